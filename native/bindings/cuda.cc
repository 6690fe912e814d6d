#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>

#include "bindings.h"
#include "lmcache/cuda_copy.h"

namespace {

using lmcache::CudaCopyMethods;
using lmcache::CudaDevice;
using lmcache::CudaFence;

auto trials(const CudaCopyMethods& methods) {
    std::vector<std::tuple<const char*, double, double>> all;
    for (const lmcache::MethodTrial& trial : methods.trials())
        all.emplace_back(copy_method_name(trial.method), trial.to_host_gb_per_second, trial.to_device_gb_per_second);
    return all;
}

}  // namespace

void bind_cuda(nb::module_& m) {
    nb::class_<CudaFence>(m, "CudaFence", "The end of what the engine had launched on a stream when this was made.")
        .def("wait", &CudaFence::wait, ReleaseGil(), "RuntimeError when the device fails.");
    nb::class_<CudaDevice>(m, "CudaDevice",
                           "One GPU, by NVIDIA's driver API from `library`, in the context that the engine uses. "
                           "RuntimeError says in a sentence what the driver refuses. Thread-safe.")
        .def(nb::new_([](const std::string& library, int ordinal) {
                 nb::gil_scoped_release release;
                 return CudaDevice::open(library, ordinal);
             }),
             nb::arg("library"), nb::arg("ordinal"))
        .def("register_memory", &CudaDevice::register_memory, nb::arg("address"), nb::arg("size_bytes"), ReleaseGil(),
             "Pins memory that is present; pieces must not overlap.")
        .def("unregister_memory", &CudaDevice::unregister_memory, nb::arg("address"), nb::arg("size_bytes"),
             ReleaseGil(), "All pieces that begin in the range.")
        .def("fence", &CudaDevice::fence, nb::arg("stream"), ReleaseGil())
        .def("take_failure", &CudaDevice::take_failure, R"(Why the last copy failed, once; "" if none has since.)");
    nb::class_<CudaCopyMethods>(
        m, "CudaCopyMethods",
        "The methods of copying many pieces of `run_bytes`, tried on `trial_bytes` of the device's memory and as much "
        "of the host's, given back afterwards. RuntimeError when none copies right.")
        .def(nb::new_([](std::shared_ptr<CudaDevice> device, std::size_t run_bytes, std::size_t trial_bytes) {
                 nb::gil_scoped_release release;
                 return std::make_shared<CudaCopyMethods>(std::move(device), run_bytes, trial_bytes);
             }),
             nb::arg("device"), nb::arg("run_bytes"), nb::arg("trial_bytes"))
        .def_prop_ro(
            "best", [](const CudaCopyMethods& methods) { return copy_method_name(methods.best()); },
            R"("single", "batch" or "kernel".)")
        .def_prop_ro("one_copy_gb_per_second", &CudaCopyMethods::one_copy_gb_per_second,
                     "To host memory, in one piece: the limit.")
        .def_prop_ro("trials", trials, "(method, GB/s to the host, GB/s to the device), 0 for one that failed.");
}
