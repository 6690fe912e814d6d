// Has a chosen allocation of the calling thread fail. Sanitizers keep their own operator new: with them nothing fails.
#pragma once

#include <new>

// 0: none, n: the n-th from now on.
extern thread_local int allocations_until_failure;

// Whether the call ends with std::bad_alloc when its n-th allocation fails; false when it makes fewer.
template <typename Call>
bool fails_at_allocation(int number, const Call& call) {
    allocations_until_failure = number;
    try {
        call();
    } catch (const std::bad_alloc&) {
        return true;
    }
    allocations_until_failure = 0;
    return false;
}
