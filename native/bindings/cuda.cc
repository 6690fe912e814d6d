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
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

nb::list trials(const CudaCopyMethods& methods) {
    nb::list all;
    for (const lmcache::MethodTrial& trial : methods.trials()) {
        all.append(
            nb::make_tuple(copy_method_name(trial.method), trial.to_host_gb_per_second, trial.to_device_gb_per_second));
    }
    return all;
}

}  // namespace

void bind_cuda(nb::module_& m) {
    nb::class_<CudaFence>(m, "CudaFence").def("wait", &CudaFence::wait, ReleaseGil());
    nb::class_<CudaDevice>(m, "CudaDevice")
        .def(nb::new_([](const std::string& library, int ordinal) {
                 nb::gil_scoped_release release;
                 return CudaDevice::open(library, ordinal);
             }),
             nb::arg("library"), nb::arg("ordinal"))
        .def("register_memory", &CudaDevice::register_memory, nb::arg("address"), nb::arg("size_bytes"), ReleaseGil())
        .def("unregister_memory", &CudaDevice::unregister_memory, nb::arg("address"), nb::arg("size_bytes"),
             ReleaseGil())
        .def("fence", &CudaDevice::fence, nb::arg("stream"), ReleaseGil())
        .def("take_failure", &CudaDevice::take_failure);
    nb::class_<CudaCopyMethods>(m, "CudaCopyMethods")
        .def(nb::new_([](std::shared_ptr<CudaDevice> device, std::size_t run_bytes, std::size_t trial_bytes) {
                 nb::gil_scoped_release release;
                 return std::make_shared<CudaCopyMethods>(std::move(device), run_bytes, trial_bytes);
             }),
             nb::arg("device"), nb::arg("run_bytes"), nb::arg("trial_bytes"))
        .def_prop_ro("best", [](const CudaCopyMethods& methods) { return copy_method_name(methods.best()); })
        .def_prop_ro("one_copy_gb_per_second", &CudaCopyMethods::one_copy_gb_per_second)
        .def_prop_ro("trials", trials);
}
