// What C++ tests are made of: TEST_CASE registers a function under the name of its file and its own, CHECK ends the
// process with 1 and prints its place. Both may be used in any thread and in forked children.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

struct TestCase {
    const char* file;
    const char* name;
    void (*run)();
};

inline std::vector<TestCase>& test_cases() {
    static std::vector<TestCase> cases;
    return cases;
}

#define TEST_CASE(name)                                                                                      \
    void name();                                                                                             \
    [[maybe_unused]] const bool registered_##name = (test_cases().push_back({__FILE__, #name, name}), true); \
    void name()

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
