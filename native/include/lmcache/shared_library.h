// A shared library of the machine, opened at run time: neither its headers nor the library are needed to build. It
// stays open as long as the process lives.
#pragma once

#include <dlfcn.h>

#include <initializer_list>
#include <string>

namespace lmcache {

class SharedLibrary {
public:
    // The first one of these that is there.
    explicit SharedLibrary(std::initializer_list<const char*> names) {
        for (const char* const name : names) {
            name_ = name;
            handle_ = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
            if (handle_ != nullptr) return;
        }
        const char* const reason = ::dlerror();
        refusal_ = reason != nullptr ? reason : name_ + " cannot be loaded";
    }

    bool is_open() const { return handle_ != nullptr; }
    // Why none is; "" where one is.
    const std::string& refusal() const { return refusal_; }

    // False where it has no such call.
    template <typename Call>
    bool find(Call& call, const char* symbol) const {
        call = reinterpret_cast<Call>(::dlsym(handle_, symbol));
        return call != nullptr;
    }

    // Throws an Error where it has no such call.
    template <typename Error, typename Call>
    void need(Call& call, const char* symbol) const {
        if (!find(call, symbol)) throw Error(name_ + " is too old: it lacks " + symbol);
    }

private:
    void* handle_ = nullptr;
    std::string name_, refusal_;
};

}  // namespace lmcache
