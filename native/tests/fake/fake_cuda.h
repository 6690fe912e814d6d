// What tests tell the fake driver, and what they ask it. Host memory plays the device's.
#pragma once

#include <cstddef>

extern "C" {
void fake_cuda_reset();  // forgets injected faults, delays and counters, and a lost context with all that it had
void fake_cuda_map_device(void* memory, std::size_t size_bytes);  // from now on it is device memory
void fake_cuda_unmap_device(void* memory);

// The call fails with `code` for `times` times, after `skip` successes. "execution" names the copies themselves, on
// their stream: such a fault loses the context, as real ones do.
void fake_cuda_fail(const char* call, int skip, int times, int code);
void fake_cuda_lose_context();
void fake_cuda_delay(int microseconds);                   // each copy takes this long more, twice that at most
void fake_cuda_cost(const char* call, int microseconds);  // each run of such a call takes this long more
void fake_cuda_spoil_kernel(int spoil);                   // the kernel leaves out the last run
void fake_cuda_capture(int capturing);  // calls of threads that have not declared themselves harmless are misuse

void* fake_cuda_stream();           // one of the engine
void fake_cuda_hold(void* stream);  // work that ends with fake_cuda_release
void fake_cuda_release();
void fake_cuda_finish(void* stream);  // waits for all work of an engine's stream

const char* fake_cuda_misuse();  // the first use that a real driver may punish, in words; "" if none
long fake_cuda_calls(const char* call);
long fake_cuda_copies(int to_device, int priority);  // runs copied on streams of this priority
long fake_cuda_alive();                              // contexts, streams, events, modules and memory not given back
}
