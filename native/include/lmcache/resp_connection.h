// Commands and replies of Redis' protocol (RESP2) on one connection.
// https://redis.io/docs/latest/develop/reference/protocol-spec/
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lmcache/resp_stream.h"

namespace lmcache {

// A whole reply, for commands whose replies are small.
struct RespReply {
    enum class Kind : std::uint8_t { kNull, kText, kError, kNumber, kList };
    Kind kind = Kind::kNull;
    std::int64_t number = 0;
    std::string text;
    std::vector<RespReply> items;

    bool is_error() const { return kind == Kind::kError; }
};

// The first line of a reply. '$': `number` bytes and CR LF follow; '*': so many replies follow; -1 is null for both.
struct RespHead {
    char kind = 0;  // + - : $ *
    std::int64_t number = 0;
    std::string_view text;  // of + and -; valid until the next call

    bool is_error() const { return kind == '-'; }
    bool is_null() const { return (kind == '$' || kind == '*') && number < 0; }
};

// Commands that are written at once. Bulk arguments stay where they are.
class RespPipeline {
public:
    void add(std::initializer_list<std::string_view> arguments);
    void add(std::span<const std::string> arguments);
    // The last argument is memory.
    void add(std::initializer_list<std::string_view> arguments, const std::byte* memory, std::uint64_t bytes);

    // Valid until the next call of anything.
    std::span<iovec> parts();

private:
    struct Part {
        std::size_t text_end;  // what of `text_` goes before the memory
        const std::byte* memory;
        std::uint64_t bytes;
    };
    void begin(std::size_t arguments);
    void append(std::string_view argument);

    std::string text_;
    std::vector<Part> memory_;
    std::vector<iovec> parts_;
};

struct RespCredentials {
    std::string username, password;
    unsigned database = 0;
    bool no_touch = false;  // what this connection reads does not count as use, where the server can do that
    // Files of one line each, in place of what is above, read for each connection: they may change. Empty: none.
    std::string username_file, password_file;
};

// One thread at a time. After a RespFault the connection is of no more use.
class RespConnection {
public:
    static constexpr std::uint64_t kMaxReplyBytes = 64 << 20;  // of read_reply, over all its parts

    // Connects and logs in. RespFault: EACCES where the server refuses the user or the password, or where they are not
    // in their files.
    RespConnection(const RespAddress& address, const TlsContext* tls, const RespCredentials& credentials, int stop_fd,
                   RespDeadline deadline);

    void write(RespPipeline& commands, RespDeadline deadline) { stream_.write(commands.parts(), deadline); }

    // The rest of the reply has to be read, too.
    RespHead read_head(RespDeadline deadline);
    RespReply read_reply(RespDeadline deadline);

    // The content of a '$' of `size` bytes: as much as there is room for, the rest is dropped.
    void read_bulk(std::span<std::byte> memory, std::uint64_t size, RespDeadline deadline);
    std::string read_text(std::uint64_t size, RespDeadline deadline);

    bool was_used = false;  // since it was made: then the server may have closed it in the meantime

private:
    RespReply read_part(unsigned depth, std::uint64_t& budget, RespDeadline deadline);
    void end_bulk(RespDeadline deadline);

    RespStream stream_;
};

// A number in an errno for an error of the server: ENOSPC for OOM, EACCES, EROFS for READONLY, EAGAIN where a later
// attempt may succeed, EPROTOTYPE for WRONGTYPE, else EIO.
int resp_error_number(std::string_view text);

}  // namespace lmcache
