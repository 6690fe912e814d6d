// Zeroed memory as O_DIRECT wants it, filled with what tells one seed and place from another.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "check.h"

struct Memory {
    explicit Memory(std::size_t size) : size_bytes(size) {
        CHECK(::posix_memalign(reinterpret_cast<void**>(&data), 4096, size) == 0);
        std::memset(data, 0, size);
    }
    ~Memory() { std::free(data); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    std::uint64_t address(std::size_t offset = 0) const { return reinterpret_cast<std::uint64_t>(data + offset); }
    void fill(unsigned seed) {
        for (std::size_t i = 0; i < size_bytes; ++i) data[i] = static_cast<unsigned char>((i * 131 + seed * 7919) >> 3);
    }
    unsigned char* data = nullptr;
    std::size_t size_bytes;
};
