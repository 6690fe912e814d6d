// Integers rounded up.
#pragma once

#include <concepts>

namespace lmcache {

template <std::unsigned_integral T>
constexpr T div_ceil(T value, T divisor) {
    return value / divisor + (value % divisor != 0);
}

// The smallest multiple of `unit` that is not below `value`.
template <std::unsigned_integral T>
constexpr T round_up(T value, T unit) {
    return div_ceil(value, unit) * unit;
}

}  // namespace lmcache
