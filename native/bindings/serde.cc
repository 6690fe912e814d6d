#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <memory>
#include <optional>

#include "bindings.h"
#include "lmcache/aesgcm_stage.h"
#include "lmcache/cachegen_stage.h"
#include "lmcache/exponent_stage.h"
#include "lmcache/fp8_stage.h"
#include "lmcache/serde_queue.h"
#include "lmcache/zstd_stage.h"

using lmcache::SerdeChain;
using lmcache::SerdeFault;
using lmcache::SerdeJob;
using lmcache::SerdeObject;
using lmcache::SerdeQueue;
using lmcache::SerdeStage;

// Beside its results, where bind_completions finds it.
namespace lmcache {
static auto completion(std::uint64_t job, SerdeResults&& results) {
    return std::tuple(job, AsNumbers{std::move(results.frame_bytes)}, AsBytes{std::move(results.faults)});
}
}  // namespace lmcache

namespace {

using Source = Packed<std::byte, "source">;
using Destination = Packed<std::byte, "destination", Access::kWrite>;

nb::bytes bytes_of(std::span<const std::byte> bytes) { return nb::bytes(bytes.data(), bytes.size()); }

// Native memory, and how many views Python has of it: parts of a memoryview outlive its release.
struct LentMemory {
    void* data;
    Py_ssize_t size_bytes;
    bool is_readonly;
    std::size_t views = 0;
};

int get_view(PyObject* self, Py_buffer* view, int flags) {
    auto& memory = *nb::inst_ptr<LentMemory>(self);
    const int result = PyBuffer_FillInfo(view, self, memory.data, memory.size_bytes, memory.is_readonly, flags);
    if (result == 0) ++memory.views;
    return result;
}

void release_view(PyObject* self, Py_buffer*) { --nb::inst_ptr<LentMemory>(self)->views; }

PyType_Slot lent_memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_view)},
                                   {Py_bf_releasebuffer, reinterpret_cast<void*>(release_view)},
                                   {0, nullptr}};

// A memoryview of native memory, released at the end of the scope: using it later is an error in Python.
class LentView {
public:
    LentView(std::span<const std::byte> memory, bool is_readonly)
        : memory_(nb::cast(LentMemory{const_cast<std::byte*>(memory.data()),  // readonly says what may be done
                                      static_cast<Py_ssize_t>(memory.size()), is_readonly})),
          view_(nb::steal(PyMemoryView_FromObject(memory_.ptr()))) {
        if (!view_.is_valid()) throw nb::python_error();
    }
    LentView(const LentView&) = delete;
    LentView& operator=(const LentView&) = delete;
    ~LentView() { (void)is_kept(); }

    const nb::object& get() const { return view_; }

    // Ends the view. Whether somebody has another one of the same memory, which nothing can end.
    bool is_kept() {
        if (view_.is_valid()) {
            try {
                view_.attr("release")();
            } catch (nb::python_error&) {  // somebody has a view of the view
            }
            view_.reset();
        }
        return nb::inst_ptr<LentMemory>(memory_)->views != 0;
    }

private:
    nb::object memory_, view_;
};

// A stage written in Python. Called without the GIL, by threads that Python did not start.
class PythonStage final : public SerdeStage {
public:
    PythonStage(nb::object stage, bool lossy) : stage_(std::move(stage)), lossy_(lossy) {}
    PythonStage(const PythonStage&) = delete;
    PythonStage& operator=(const PythonStage&) = delete;
    ~PythonStage() override {
        const nb::gil_scoped_acquire acquired;
        stage_.reset();
    }

    bool is_lossy() const override { return lossy_; }

    std::size_t max_encoded_bytes(std::size_t source_bytes) const override {
        const nb::gil_scoped_acquire acquired;
        return in_python<std::size_t>(
            [&] { return nb::cast<std::size_t>(stage_.attr("max_encoded_bytes")(source_bytes)); });
    }

    std::optional<std::size_t> encode(std::span<const std::byte> source, std::span<std::byte> destination,
                                      const SerdeObject& object, std::vector<std::byte>&) const override {
        const nb::gil_scoped_acquire acquired;
        return in_python<std::optional<std::size_t>>(
            [&] { return nb::cast<std::optional<std::size_t>>(called("encode", source, destination, object)); });
    }

    SerdeFault decode(std::span<const std::byte> source, std::span<std::byte> destination, const SerdeObject& object,
                      std::span<const std::byte>) const override {
        const nb::gil_scoped_acquire acquired;
        return in_python<SerdeFault>([&] {
            const auto decoded = nb::cast<std::optional<bool>>(called("decode", source, destination, object));
            if (!decoded) return SerdeFault::kFailed;
            return *decoded ? SerdeFault::kNone : SerdeFault::kCorrupt;
        });
    }

private:
    nb::object called(const char* method, std::span<const std::byte> source, std::span<std::byte> destination,
                      const SerdeObject& object) const {
        LentView from(source, true), to(destination, false);
        nb::object result =
            stage_.attr(method)(from.get(), to.get(), bytes_of(object.name_space), bytes_of(object.chunk_hash));
        const bool source_is_kept = from.is_kept();
        if (to.is_kept() || source_is_kept) {
            stage_.attr("kept")();
            throw std::runtime_error("a serde plug-in kept memory");
        }
        return result;
    }

    // A Python exception must not leave the scope that has the GIL.
    template <typename T, typename Call>
    static T in_python(const Call& call) {
        try {
            return call();
        } catch (nb::python_error& error) {
            error.discard_as_unraisable("lmcache serde plug-in");
        } catch (const nb::cast_error&) {
        }
        throw std::runtime_error("a serde plug-in failed");
    }

    nb::object stage_;
    const bool lossy_;
};

struct Stage {
    std::shared_ptr<const SerdeStage> stage;
};

struct Chain {
    std::shared_ptr<const SerdeChain> chain;
};

// Its threads may wait for the GIL, so that ending them needs it to be free.
class PythonSerdeQueue : public SerdeQueue {
public:
    using SerdeQueue::SerdeQueue;
    ~PythonSerdeQueue() {
        const nb::gil_scoped_release released;
        close();
    }
};

std::vector<lmcache::MasterKey> master_keys(const std::vector<nb::bytes>& keys) {
    std::vector<lmcache::MasterKey> all(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
        if (keys[i].size() != lmcache::kMasterKeyBytes) throw std::invalid_argument("a master key must have 32 bytes");
        std::memcpy(all[i].bytes.data(), keys[i].data(), keys[i].size());
    }
    return all;
}

struct Cipher {
    std::shared_ptr<lmcache::ObjectCipher> cipher;
};

void bind_cipher(nb::module_& m) {
    m.def("crypto_refusal", &lmcache::crypto_refusal, "Why libcrypto cannot be used; \"\" where it can be.");
    nb::class_<Cipher>(m, "ObjectCipher")
        .def(
            "__init__",
            [](Cipher* self, const std::vector<nb::bytes>& keys, unsigned aes_bits) {
                new (self) Cipher{std::make_shared<lmcache::ObjectCipher>(master_keys(keys), aes_bits)};
            },
            nb::arg("keys"), nb::arg("aes_bits"),
            "1 to 16 master keys of 32 bytes: the first one seals, all of them open.")
        .def(
            "replace_keys",
            [](const Cipher& self, const std::vector<nb::bytes>& keys) {
                auto all = master_keys(keys);
                const nb::gil_scoped_release released;
                self.cipher->replace_keys(std::move(all));
            },
            nb::arg("keys"));
    m.def(
        "aesgcm_stage", [](const Cipher& cipher) { return Stage{lmcache::make_aesgcm_stage(cipher.cipher)}; },
        nb::arg("cipher"));
}

SerdeObject object_without_key() {
    static constexpr std::byte kNothing[lmcache::kDigestBytes] = {};
    return {{}, std::span(kNothing), std::span(kNothing), {}};
}

std::optional<std::tuple<std::size_t, AsBytes<std::vector<std::byte>>>> encode(const Stage& self, const Source& source,
                                                                               const Destination& destination) {
    if (destination.size() < self.stage->max_encoded_bytes(source.size()))
        throw std::invalid_argument("destination must have max_encoded_bytes of the source");
    std::vector<std::byte> parameters;
    const auto written = self.stage->encode(source, destination, object_without_key(), parameters);
    if (!written) return std::nullopt;
    return std::tuple(*written, AsBytes{std::move(parameters)});
}

const char* decode(const Stage& self, const Source& source, const Destination& destination,
                   const Packed<std::byte, "parameters">& parameters) {
    return lmcache::serde_fault_name(self.stage->decode(source, destination, object_without_key(), parameters));
}

std::uint64_t submit(PythonSerdeQueue& self, bool encodes, Ranges sources, Ranges destinations,
                     const Packed<std::byte, "hashes">& hashes,
                     const Packed<lmcache::SerdeTemplates, "templates">& templates,
                     const Packed<std::uint32_t, "positions">& positions) {
    auto job = std::make_shared<SerdeJob>();
    job->encodes = encodes;
    job->sources = std::move(sources.addresses);
    job->source_bytes = std::move(sources.sizes);
    job->destinations = std::move(destinations.addresses);
    job->destination_bytes = std::move(destinations.sizes);
    job->chunk_hashes = hashes;
    job->positions = positions;
    for (std::size_t i = 0; i < templates.size(); ++i) {
        const auto pair = std::as_bytes(std::span(&templates[i], 1));
        job->templates.push_back({lmcache::frame_template_from_bytes(pair.first(sizeof(lmcache::FrameHeader))),
                                  lmcache::frame_template_from_bytes(pair.last(sizeof(lmcache::FrameHeader)))});
    }
    return self.submit(std::move(job));
}

void bind_stages(nb::module_& m) {
    nb::class_<Stage>(
        m, "SerdeStage",
        "Turns a payload into another one and back (docs/formats/serde.md). Thread-safe, without the GIL.")
        .def_prop_ro(
            "is_lossy", [](const Stage& self) { return self.stage->is_lossy(); },
            "Whether what is decoded is only near what was encoded.")
        .def(
            "max_encoded_bytes",
            [](const Stage& self, std::size_t source_bytes) { return self.stage->max_encoded_bytes(source_bytes); },
            nb::arg("source_bytes"), ReleaseGil())
        .def("encode", encode, nb::arg("source"), nb::arg("destination"), ReleaseGil(),
             "Bytes written, and parameters for `decode`; None: there is nothing to gain. Without a key: for tests and "
             "benchmarks.")
        .def("decode", decode, nb::arg("source"), nb::arg("destination"), nb::arg("parameters"), ReleaseGil(),
             "Fills `destination`, which has the size of what was encoded. \"\", \"corrupt\", \"unreadable\" or "
             "\"failed\".");
    m.def(
        "exponent_stage",
        [](double smallest_saving, const std::string& path) {
            const auto* const kernels =
                path.empty() ? &lmcache::best_exponent_kernels() : lmcache::exponent_kernels(path.c_str());
            if (kernels == nullptr) throw std::invalid_argument("path must be one that this CPU can run");
            return Stage{lmcache::make_exponent_stage(smallest_saving, *kernels)};
        },
        nb::arg("smallest_saving"), nb::arg("path") = "",
        "`path`: \"portable\", \"avx2\", \"avx512\" or \"\" for the best.");
    m.def(
        "fp8_stage",
        [](const std::string& format, const std::string& path) {
            if (format != "e4m3" && format != "e5m2") throw std::invalid_argument("format must be e4m3 or e5m2");
            return Stage{lmcache::make_fp8_stage(
                format == "e4m3" ? lmcache::Fp8Format::kE4m3 : lmcache::Fp8Format::kE5m2, path)};
        },
        nb::arg("format"), nb::arg("path") = "",
        "`format`: \"e4m3\" or \"e5m2\". `path`: as of `exponent_stage`. Lossy.");
    m.def(
        "cachegen_stage", [](unsigned bins) { return Stage{lmcache::make_cachegen_stage(bins)}; }, nb::arg("bins"),
        "`bins`: 16 or 32. Lossy.");
    bind_cipher(m);
    m.def("zstd_refusal", &lmcache::zstd_refusal, "Why libzstd.so.1 cannot be used; \"\" where it can be.");
    m.def(
        "zstd_stage",
        [](int level, double smallest_saving) { return Stage{lmcache::make_zstd_stage(level, smallest_saving)}; },
        nb::arg("level"), nb::arg("smallest_saving"), "RuntimeError where `zstd_refusal` says why.");
    m.def(
        "python_stage",
        [](nb::object stage, bool lossy) { return Stage{std::make_shared<PythonStage>(std::move(stage), lossy)}; },
        nb::arg("stage"), nb::arg("lossy") = false,
        "Calls `max_encoded_bytes(source_bytes) -> int`, `encode(source, destination, namespace, chunk_hash) -> "
        "int|None` and `decode(source, destination, namespace, chunk_hash) -> bool|None`, with memoryviews that end "
        "with the call, and `kept()` where one did not: the call has failed then.");
    nb::class_<LentMemory>(m, "LentMemory", nb::type_slots(lent_memory_slots));
}

}  // namespace

void bind_serde(nb::module_& m) {
    bind_stages(m);
    nb::class_<Chain>(m, "SerdeChain")
        .def(
            "__init__",
            [](Chain* self, std::string name, const std::vector<Stage>& stages) {
                std::vector<std::shared_ptr<const SerdeStage>> all;
                for (const Stage& stage : stages) all.push_back(stage.stage);
                new (self) Chain{std::make_shared<SerdeChain>(std::move(name), std::move(all))};
            },
            nb::arg("name"), nb::arg("stages"))
        .def(
            "max_frame_bytes",
            [](const Chain& self, std::uint64_t served_frame_bytes) {
                return self.chain->max_frame_bytes(served_frame_bytes);
            },
            nb::arg("served_frame_bytes"), ReleaseGil(), "Memory that it takes to encode a frame of that size.");
    nb::class_<PythonSerdeQueue> queue(m, "SerdeQueue",
                                       "Encodes and decodes whole frames on threads of its own, of low priority.");
    queue
        .def(
            "__init__",
            [](PythonSerdeQueue* self, const Chain& chain, std::size_t threads) {
                new (self) PythonSerdeQueue(chain.chain, threads);
            },
            nb::arg("chain"), nb::arg("threads"))
        .def("submit", submit, nb::arg("encodes"), nb::arg("sources"), nb::arg("destinations"), nb::arg("hashes"),
             nb::arg("templates"), nb::arg("positions"), ReleaseGil(),
             "Returns a job number. `templates` are those of a served and its stored namespace, in turn, without a "
             "payload size; `positions` (u32) says which belongs to each frame. Memory must stay until the job is "
             "drained.");
    bind_completions(queue,
                     "(job, bytes of each frame written (u64) or 0, fault of each: 0 none, 1 corrupt, 2 unreadable, "
                     "3 failed)");
}
