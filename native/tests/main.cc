// lmcache_tests [--list] [PART...]: runs the tests whose `file/name` has one of the parts in it, or all.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "check.h"

namespace {

std::string full_name(const TestCase& test) {
    const char* const slash = std::strrchr(test.file, '/');
    const std::string file = slash != nullptr ? slash + 1 : test.file;
    return file.substr(0, file.find('.')) + "/" + test.name;
}

}  // namespace

int main(int count, char** arguments) {
    const bool lists = count > 1 && std::strcmp(arguments[1], "--list") == 0;
    const std::vector<std::string> parts(arguments + (lists ? 2 : 1), arguments + count);
    int passed = 0;
    for (const TestCase& test : test_cases()) {
        const std::string name = full_name(test);
        const bool selected = std::ranges::any_of(parts, [&](auto& part) { return name.find(part) != name.npos; });
        if (!parts.empty() && !selected) continue;
        std::printf("%s%s", name.c_str(), lists ? "\n" : " ");
        std::fflush(stdout);
        if (lists) continue;
        const auto began = std::chrono::steady_clock::now();
        try {
            test.run();
        } catch (const std::exception& fault) {
            std::fprintf(stderr, "%s threw: %s\n", name.c_str(), fault.what());
            return 1;
        }
        const std::chrono::duration<double> lasted = std::chrono::steady_clock::now() - began;
        std::printf("%.2f s\n", lasted.count());
        ++passed;
    }
    if (lists) return 0;
    std::printf("%d passed, 0 failed\n", passed);
    return passed > 0 ? 0 : 1;
}
