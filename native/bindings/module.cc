// The Python module. Each file in this folder binds one header and does nothing but convert arguments.
#include <cerrno>
#include <system_error>

#include "bindings.h"
#include "lmcache/yielding_mutex.h"

namespace {

// What Python code sees of native faults, beside nanobind's own ValueError (std::invalid_argument) and RuntimeError.
void translate(const std::exception_ptr& fault, void*) {
    try {
        std::rethrow_exception(fault);
    } catch (const lmcache::Closed&) {
        const nb::object type = nb::module_::import_("lmcache.errors").attr("ServerUnavailable");
        PyErr_SetString(type.ptr(), "The server is shutting down: L1 is closed.");
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
    }
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() =
        "The native core. Every batch call takes packed little-endian buffers (bytes, bytearray, memoryview) and "
        "releases the GIL.\n\n"
        "u32/i64/u64 are the element types inside such a buffer; `hashes` is n x 32 bytes. `NO_SLOT` marks an absent "
        "offset. Bad arguments raise ValueError with a sentence. Methods are thread-safe unless they say otherwise.";
    nb::register_exception_translator(translate);
    // An engine that is killed or exits with daemon threads leaves objects behind; that is no fault worth pages of
    // output.
    nb::set_leak_warnings(false);
    bind_machine(m);
    bind_hashing(m);
    bind_frame(m);
    bind_cuda(m);
    bind_paged_copy(m);
    bind_change_log(m);
    bind_l1_results(m);
    bind_l1(m);
    bind_ledger(m);
    bind_fleet_directory(m);
    bind_file_io(m);
    bind_folder_scan(m);
    bind_mapped_copy(m);
    bind_raw_block(m);
    bind_raw_index(m);
    bind_resp(m);
    bind_serde(m);
    bind_seen_chunks(m);
}
