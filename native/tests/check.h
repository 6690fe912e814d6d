// A test is a main() that calls CHECK; the first failure prints its place and ends the process with 1.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                               \
        }                                                                               \
    } while (0)

// Whether the call throws that.
template <class Fault = std::invalid_argument, class Call>
bool refused(Call&& call) {
    try {
        call();
    } catch (const Fault&) {
        return true;
    }
    return false;
}
