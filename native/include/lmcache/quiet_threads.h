// Threads that leave the signals of the process to the threads it has itself.
#pragma once

#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

namespace lmcache {

// Appends `count` threads that run `work`; only signals that a fault of a thread itself raises reach it. `name`: at
// most 15 characters. Throws std::system_error when one cannot be started; those before it are in `threads` then.
void start_quiet_threads(std::vector<std::thread>& threads, std::size_t count, const char* name,
                         const std::function<void()>& work);

}  // namespace lmcache
