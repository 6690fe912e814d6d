// Included by every path of the exponent kernels, behind its LMCACHE_ISA_INLINE and trailing_zeros(), which is 64 for
// 0.

// Most groups have few escapes, but rarely as many as the one before: so many are moved at once without asking, where
// memory behind the last one allows it, and no branch is mispredicted.
constexpr std::size_t kEscapesAtOnce = 4;

// Appends the exponents of one group that `mask` has. Reads exponents[kGroupElements], too, and writes up to
// kEscapesAtOnce bytes.
LMCACHE_ISA_INLINE std::uint8_t* take_escapes(std::uint64_t mask, const std::uint8_t* exponents,
                                              std::uint8_t* escapes) {
    std::uint8_t* const end = escapes + std::popcount(mask);
    for (std::size_t i = 0; i < kEscapesAtOnce; ++i, mask &= mask - 1) escapes[i] = exponents[trailing_zeros(mask)];
    for (escapes += kEscapesAtOnce; mask != 0; mask &= mask - 1) *escapes++ = exponents[trailing_zeros(mask)];
    return end;
}

// Puts escapes into the exponents of one group that `mask` has, and may write exponents[kGroupElements]. False: there
// are not enough.
LMCACHE_ISA_INLINE bool put_escapes(std::uint64_t mask, const std::uint8_t*& escapes, const std::uint8_t* end,
                                    std::uint8_t* exponents) {
    const auto left = static_cast<std::size_t>(end - escapes);
    const auto count = static_cast<std::size_t>(std::popcount(mask));
    if (left < count) return false;
    const std::uint8_t* next = escapes;
    if (left >= kEscapesAtOnce) {
        for (std::size_t i = 0; i < kEscapesAtOnce; ++i, mask &= mask - 1) exponents[trailing_zeros(mask)] = *next++;
    }
    for (; mask != 0; mask &= mask - 1) exponents[trailing_zeros(mask)] = *next++;
    escapes += count;
    return true;
}
