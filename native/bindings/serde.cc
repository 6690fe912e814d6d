#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>

#include "bindings.h"
#include "lmcache/aesgcm_stage.h"
#include "lmcache/exponent_stage.h"
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
inline nb::tuple completion(std::uint64_t job, const SerdeResults& results) {
    return nb::make_tuple(job, typed(results.frame_bytes), packed(results.faults));
}
}  // namespace lmcache

namespace {

std::span<const std::byte> span_of(const nb::bytes& bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

nb::bytes bytes_of(std::span<const std::byte> bytes) { return nb::bytes(bytes.data(), bytes.size()); }

// A memoryview of native memory, released at the end of the scope: using it later is an error in Python.
class LentView {
public:
    LentView(std::span<const std::byte> memory, int access)
        : view_(nb::steal(PyMemoryView_FromMemory(
              reinterpret_cast<char*>(const_cast<std::byte*>(memory.data())),  // access says what may be done
              static_cast<Py_ssize_t>(memory.size()), access))) {
        if (!view_.is_valid()) throw nb::python_error();
    }
    LentView(const LentView&) = delete;
    LentView& operator=(const LentView&) = delete;
    ~LentView() {
        try {
            view_.attr("release")();
        } catch (nb::python_error& error) {
            error.discard_as_unraisable("lmcache serde plug-in");
        }
    }
    const nb::object& get() const { return view_; }

private:
    nb::object view_;
};

// A stage written in Python. Called without the GIL, by threads that Python did not start.
class PythonStage final : public SerdeStage {
public:
    explicit PythonStage(nb::object stage) : stage_(std::move(stage)) {}
    PythonStage(const PythonStage&) = delete;
    PythonStage& operator=(const PythonStage&) = delete;
    ~PythonStage() override {
        const nb::gil_scoped_acquire acquired;
        stage_.reset();
    }

    std::size_t max_encoded_bytes(std::size_t source_bytes) const override {
        const nb::gil_scoped_acquire acquired;
        return in_python<std::size_t>(
            [&] { return nb::cast<std::size_t>(stage_.attr("max_encoded_bytes")(source_bytes)); });
    }

    std::optional<std::size_t> encode(std::span<const std::byte> source, std::span<std::byte> destination,
                                      const SerdeObject& object, std::vector<std::byte>&) const override {
        const nb::gil_scoped_acquire acquired;
        return in_python<std::optional<std::size_t>>([&] {
            const LentView from(source, PyBUF_READ), to(destination, PyBUF_WRITE);
            return nb::cast<std::optional<std::size_t>>(
                stage_.attr("encode")(from.get(), to.get(), bytes_of(object.name_space), bytes_of(object.chunk_hash)));
        });
    }

    SerdeFault decode(std::span<const std::byte> source, std::span<std::byte> destination, const SerdeObject& object,
                      std::span<const std::byte>) const override {
        const nb::gil_scoped_acquire acquired;
        return in_python<SerdeFault>([&] {
            const LentView from(source, PyBUF_READ), to(destination, PyBUF_WRITE);
            const bool decoded = nb::cast<bool>(
                stage_.attr("decode")(from.get(), to.get(), bytes_of(object.name_space), bytes_of(object.chunk_hash)));
            return decoded ? SerdeFault::kNone : SerdeFault::kCorrupt;
        });
    }

private:
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

nb::object encode_stage(const Stage& self, nb::handle source, nb::handle destination) {
    const PackedView<std::byte> from(source, "source"), to(destination, "destination", true);
    std::vector<std::byte> parameters;
    std::optional<std::size_t> written;
    {
        const nb::gil_scoped_release released;
        if (to.size() < self.stage->max_encoded_bytes(from.size()))
            throw std::invalid_argument("destination must have max_encoded_bytes of the source");
        written = self.stage->encode({from.data(), from.size()}, {const_cast<std::byte*>(to.data()), to.size()},
                                     object_without_key(), parameters);
    }
    if (!written) return nb::none();
    return nb::make_tuple(*written, packed(parameters));
}

const char* decode_stage(const Stage& self, nb::handle source, nb::handle destination, const nb::bytes& parameters) {
    const PackedView<std::byte> from(source, "source"), to(destination, "destination", true);
    const nb::gil_scoped_release released;
    return lmcache::serde_fault_name(self.stage->decode({from.data(), from.size()},
                                                        {const_cast<std::byte*>(to.data()), to.size()},
                                                        object_without_key(), span_of(parameters)));
}

std::uint64_t submit(PythonSerdeQueue& self, bool encodes, const nb::list& sources, const nb::list& destinations,
                     nb::handle hashes, nb::handle templates, nb::handle positions) {
    auto job = std::make_shared<SerdeJob>();
    job->encodes = encodes;
    Ranges from(sources), to(destinations);
    job->sources = std::move(from.addresses);
    job->source_bytes = std::move(from.sizes);
    job->destinations = std::move(to.addresses);
    job->destination_bytes = std::move(to.sizes);
    const PackedView<std::byte> hash_view(hashes, "hashes");
    job->chunk_hashes.assign(hash_view.data(), hash_view.data() + hash_view.size());
    const PackedView<std::uint32_t> position_view(positions, "positions");
    job->positions.assign(position_view.data(), position_view.data() + position_view.size());
    const PackedView<lmcache::SerdeTemplates> template_view(templates, "templates");
    for (std::size_t i = 0; i < template_view.size(); ++i) {
        const auto pair = std::as_bytes(std::span(template_view.data() + i, 1));
        job->templates.push_back({lmcache::frame_template_from_bytes(pair.first(sizeof(lmcache::FrameHeader))),
                                  lmcache::frame_template_from_bytes(pair.last(sizeof(lmcache::FrameHeader)))});
    }
    const nb::gil_scoped_release released;
    return self.submit(std::move(job));
}

}  // namespace

void bind_serde(nb::module_& m) {
    nb::class_<Stage>(m, "SerdeStage")
        .def(
            "max_encoded_bytes",
            [](const Stage& self, std::size_t source_bytes) {
                const nb::gil_scoped_release released;
                return self.stage->max_encoded_bytes(source_bytes);
            },
            nb::arg("source_bytes"))
        .def("encode", encode_stage, nb::arg("source"), nb::arg("destination"))
        .def("decode", decode_stage, nb::arg("source"), nb::arg("destination"), nb::arg("parameters"));
    m.def(
        "exponent_stage",
        [](double smallest_saving, const std::string& path) {
            const auto* const kernels =
                path.empty() ? &lmcache::best_exponent_kernels() : lmcache::exponent_kernels(path.c_str());
            if (kernels == nullptr) throw std::invalid_argument("path must be one that this CPU can run");
            return Stage{lmcache::make_exponent_stage(smallest_saving, *kernels)};
        },
        nb::arg("smallest_saving"), nb::arg("path") = "");
    bind_cipher(m);
    m.def("zstd_refusal", &lmcache::zstd_refusal);
    m.def(
        "zstd_stage",
        [](int level, double smallest_saving) { return Stage{lmcache::make_zstd_stage(level, smallest_saving)}; },
        nb::arg("level"), nb::arg("smallest_saving"));
    m.def(
        "python_stage", [](nb::object stage) { return Stage{std::make_shared<PythonStage>(std::move(stage))}; },
        nb::arg("stage"));
    nb::class_<Chain>(m, "SerdeChain")
        .def(
            "__init__",
            [](Chain* self, const std::string& name, const nb::list& stages) {
                std::vector<std::shared_ptr<const SerdeStage>> all;
                for (const nb::handle stage : stages) all.push_back(nb::cast<const Stage&>(stage).stage);
                new (self) Chain{std::make_shared<SerdeChain>(name, std::move(all))};
            },
            nb::arg("name"), nb::arg("stages"))
        .def(
            "max_frame_bytes",
            [](const Chain& self, std::uint64_t served_frame_bytes) {
                const nb::gil_scoped_release released;
                return self.chain->max_frame_bytes(served_frame_bytes);
            },
            nb::arg("served_frame_bytes"));
    nb::class_<PythonSerdeQueue> queue(m, "SerdeQueue");
    bind_completions(queue);
    queue
        .def(
            "__init__",
            [](PythonSerdeQueue* self, const Chain& chain, std::size_t threads) {
                new (self) PythonSerdeQueue(chain.chain, threads);
            },
            nb::arg("chain"), nb::arg("threads"))
        .def("submit", submit, nb::arg("encodes"), nb::arg("sources"), nb::arg("destinations"), nb::arg("hashes"),
             nb::arg("templates"), nb::arg("positions"));
}
