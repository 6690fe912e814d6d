// The folders above the files of a file adapter (docs/formats/files.md): made for the first file, removed after the
// last one, by any number of servers at once.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace lmcache::file_folders {

// Prompts can be reconstructed from KV: never readable by everybody, by the group only if the umask allows it.
inline constexpr mode_t kFolderMode = 0770;

// How often folders are made for one file. An attempt fails only when another server removes them within microseconds.
inline constexpr int kFolderAttempts = 64;

// The folder of a path without a trailing slash; empty at the root.
inline std::string folder_of(const std::string& path) {
    const std::size_t end = path.rfind('/');
    return end == std::string::npos ? std::string() : path.substr(0, end);
}

inline bool is_gone(int error) { return error == ENOENT || error == ESTALE; }

// The base folder of an object's file, whose path is base/namespace/fan-out/file.
inline std::string base_of(const std::string& path) { return folder_of(folder_of(folder_of(path))); }

// Makes a folder and those between it and the base, which must exist: when that is gone (unmounted, removed), writing
// must fail and not fill another disk.
inline int make_folders(const std::string& folder, const std::string& base) {
    if (!folder.starts_with(base + '/')) return ENOENT;
    if (::mkdir(folder.c_str(), kFolderMode) == 0 || errno == EEXIST) return 0;
    if (!is_gone(errno)) return errno;
    if (const int refusal = make_folders(folder_of(folder), base); refusal != 0) return refusal;
    // ENOENT again: another server removed the folder above while it was empty. The caller tries once more.
    return ::mkdir(folder.c_str(), kFolderMode) == 0 || errno == EEXIST || is_gone(errno) ? 0 : errno;
}

// Runs `act`, which puts a file at the path and returns an errno. Where folders below the base are missing they are
// made first; a server that shares the base may remove them again while they are empty.
template <typename Act>
int in_folder_of(const std::string& path, const std::string& base, const Act& act) {
    int error = act();
    for (int attempt = 0; is_gone(error) && attempt < kFolderAttempts; ++attempt) {
        if (const int refusal = make_folders(folder_of(path), base); refusal != 0) return refusal;
        error = act();
    }
    return error;
}

// Removes an empty folder, and the one above it if that is empty then. Returns an errno.
inline int remove_empty(const std::string& path) {
    if (::rmdir(path.c_str()) != 0 && !is_gone(errno)) return errno;
    (void)::rmdir(folder_of(path).c_str());
    return 0;
}

}  // namespace lmcache::file_folders
