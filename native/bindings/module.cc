// The Python module. Each file in this folder binds one header and does nothing but convert arguments.
#include "bindings.h"

NB_MODULE(_native, m) {
    // An engine that is killed or exits with daemon threads leaves objects behind; that is no fault worth pages of
    // output.
    nb::set_leak_warnings(false);
    bind_machine(m);
    bind_hashing(m);
    bind_frame(m);
    bind_cuda(m);
    bind_paged_copy(m);
    bind_l1(m);
    bind_file_io(m);
    bind_folder_scan(m);
    bind_mapped_copy(m);
    bind_raw_block(m);
    bind_raw_index(m);
}
