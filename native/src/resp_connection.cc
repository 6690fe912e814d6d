#include "lmcache/resp_connection.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <optional>

namespace lmcache {
namespace {

constexpr std::string_view kTooManyClients = "ERR max number of clients";
constexpr std::size_t kMaxSecretBytes = 65536;
constexpr unsigned kMaxDepth = 8;
constexpr std::uint64_t kReplyCostBytes = sizeof(RespReply);

std::int64_t parse_number(std::string_view text) {
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || end != text.data() + text.size())
        throw RespFault(EPROTO, "the server sends a number that is none");
    return number;
}

// What a server says of a login, without what it repeats of it: "... with args beginning with: 'PASSWORD'".
std::string without_secrets(std::string_view said, const std::string& password) {
    std::string text(said.substr(0, said.find(", with args")));
    if (password.empty()) return text;
    for (std::size_t at = 0; (at = text.find(password, at)) != std::string::npos;)
        text.replace(at, password.size(), "...");
    return text;
}

// The one line of a file of a secret; nothing where no file is named.
std::optional<std::string> line_of(const std::string& path) {
    if (path.empty()) return std::nullopt;
    std::ifstream file(path, std::ios::binary);
    std::string line(kMaxSecretBytes + 1, '\0');
    file.read(line.data(), static_cast<std::streamsize>(line.size()));
    if (!file.is_open() || file.bad()) throw RespFault(EACCES, "the file " + path + " cannot be read");
    line.resize(static_cast<std::size_t>(file.gcount()));
    const bool is_short = line.size() <= kMaxSecretBytes;
    line.erase(line.find_last_not_of("\r\n") + 1);
    if (line.empty() || !is_short || line.find('\n') != std::string::npos)
        throw RespFault(EACCES, "the file " + path + " must hold one line");
    return line;
}

bool begins(std::string_view text, std::string_view word) {
    return text.starts_with(word) && (text.size() == word.size() || text[word.size()] == ' ');
}

}  // namespace

int resp_error_number(std::string_view text) {
    if (begins(text, "OOM")) return ENOSPC;
    if (begins(text, "READONLY")) return EROFS;
    if (begins(text, "WRONGTYPE")) return EPROTOTYPE;
    if (text.starts_with(kTooManyClients)) return EAGAIN;
    for (const std::string_view word : {"NOAUTH", "WRONGPASS", "NOPERM"})
        if (begins(text, word)) return EACCES;
    for (const std::string_view word : {"LOADING", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "BUSY", "MOVED", "ASK"})
        if (begins(text, word)) return EAGAIN;
    return EIO;
}

// A server without users or password says ERR to AUTH; no database of that number is an ERR, too.
static RespFault login_fault(std::string_view said, const std::string& password) {
    const int number = resp_error_number(said);
    return {number == EIO ? EACCES : number, without_secrets(said, password)};
}

void RespPipeline::begin(std::size_t arguments) { text_.append("*").append(std::to_string(arguments)).append("\r\n"); }

void RespPipeline::append(std::string_view argument) {
    text_.append("$").append(std::to_string(argument.size())).append("\r\n").append(argument).append("\r\n");
}

void RespPipeline::add(std::initializer_list<std::string_view> arguments) {
    begin(arguments.size());
    for (const std::string_view argument : arguments) append(argument);
}

void RespPipeline::add(std::span<const std::string> arguments) {
    begin(arguments.size());
    for (const std::string& argument : arguments) append(argument);
}

void RespPipeline::add(std::initializer_list<std::string_view> arguments, const std::byte* memory,
                       std::uint64_t bytes) {
    begin(arguments.size() + 1);
    for (const std::string_view argument : arguments) append(argument);
    text_.append("$").append(std::to_string(bytes)).append("\r\n");
    memory_.push_back({text_.size(), memory, bytes});
    text_.append("\r\n");
}

std::span<iovec> RespPipeline::parts() {
    parts_.clear();
    std::size_t begin = 0;
    const auto add_text = [&](std::size_t end) {
        if (end != begin) parts_.push_back({text_.data() + begin, end - begin});
        begin = end;
    };
    for (const Part& part : memory_) {
        add_text(part.text_end);
        if (part.bytes != 0) parts_.push_back({const_cast<std::byte*>(part.memory), part.bytes});
    }
    add_text(text_.size());
    return parts_;
}

RespConnection::RespConnection(const RespAddress& address, const TlsContext* tls, const RespCredentials& credentials,
                               int stop_fd, RespDeadline deadline)
    : stream_(address, tls, stop_fd, deadline) {
    RespPipeline commands;
    std::size_t needed = 0;  // replies that must not be errors
    const std::string username = line_of(credentials.username_file).value_or(credentials.username);
    const std::string password = line_of(credentials.password_file).value_or(credentials.password);
    if (!password.empty()) {
        ++needed;
        if (username.empty())
            commands.add({"AUTH", password});
        else
            commands.add({"AUTH", username, password});
    }
    if (credentials.database != 0) {
        ++needed;
        commands.add({"SELECT", std::to_string(credentials.database)});
    }
    commands.add({"CLIENT", "SETNAME", "lmcache"});
    if (credentials.no_touch) commands.add({"CLIENT", "NO-TOUCH", "ON"});  // from Redis 7.2 on
    const std::size_t optional = credentials.no_touch ? 2 : 1;
    bool is_written = false;
    try {
        write(commands, deadline);
        is_written = true;
        for (std::size_t i = 0; i < needed + optional; ++i) {
            const RespReply reply = read_reply(deadline);
            // One that takes no more clients answers so to whatever comes first.
            if (!reply.is_error() || (i >= needed && !reply.text.starts_with(kTooManyClients))) continue;
            throw login_fault(reply.text, password);
        }
    } catch (const RespFault& fault) {
        if (is_written || (fault.error != ECONNRESET && fault.error != EPIPE)) throw;
        // Why it closed is in what it sent before: an error, or an alert of TLS, which is what this throws.
        const RespHead head = read_head(deadline);
        if (!head.is_error()) throw;
        throw login_fault(head.text, password);
    }
}

RespHead RespConnection::read_head(RespDeadline deadline) {
    const std::string_view line = stream_.read_line(deadline);
    if (line.empty()) throw RespFault(EPROTO, "the server sends an empty line for a reply");
    RespHead head{line[0], 0, line.substr(1)};
    switch (head.kind) {
        case '-':
            if (head.text.empty()) head.text = "ERR";  // never mistaken for no error
            return head;
        case '+':
            return head;
        case ':':
        case '$':
        case '*':
            head.number = parse_number(head.text);
            if (head.kind != ':' && head.number < -1) break;
            return head;
        default:
            break;
    }
    throw RespFault(EPROTO, "the server does not speak Redis' protocol");
}

void RespConnection::end_bulk(RespDeadline deadline) {
    std::byte end[2];
    stream_.read(end, sizeof end, deadline);
    if (end[0] != std::byte{'\r'} || end[1] != std::byte{'\n'})
        throw RespFault(EPROTO, "a value of the server does not end where it should");
}

void RespConnection::read_bulk(std::span<std::byte> memory, std::uint64_t size, RespDeadline deadline) {
    const std::uint64_t wanted = std::min<std::uint64_t>(size, memory.size());
    stream_.read(memory.data(), wanted, deadline);
    stream_.skip(size - wanted, deadline);
    end_bulk(deadline);
}

std::string RespConnection::read_text(std::uint64_t size, RespDeadline deadline) {
    if (size > kMaxReplyBytes) throw RespFault(EPROTO, "the server sends a larger text than any command asks for");
    std::string text(size, '\0');
    stream_.read(reinterpret_cast<std::byte*>(text.data()), size, deadline);
    end_bulk(deadline);
    return text;
}

RespReply RespConnection::read_reply(RespDeadline deadline) {
    std::uint64_t budget = kMaxReplyBytes;
    return read_part(0, budget, deadline);
}

RespReply RespConnection::read_part(unsigned depth, std::uint64_t& budget, RespDeadline deadline) {
    const auto charge = [&](std::uint64_t bytes) {
        if (bytes > budget) throw RespFault(EPROTO, "the server sends a larger reply than any command asks for");
        budget -= bytes;
    };
    charge(kReplyCostBytes);
    const RespHead head = read_head(deadline);
    RespReply reply;
    switch (head.kind) {
        case '+':
        case '-':
            charge(head.text.size());
            reply.kind = head.is_error() ? RespReply::Kind::kError : RespReply::Kind::kText;
            reply.text = head.text;
            return reply;
        case ':':
            reply.kind = RespReply::Kind::kNumber;
            reply.number = head.number;
            return reply;
        default:
            break;
    }
    if (head.is_null()) return reply;
    const auto count = static_cast<std::uint64_t>(head.number);
    if (head.kind == '$') {
        charge(count);
        reply.kind = RespReply::Kind::kText;
        reply.text = read_text(count, deadline);
        return reply;
    }
    if (depth == kMaxDepth) throw RespFault(EPROTO, "the server sends lists within lists without end");
    reply.kind = RespReply::Kind::kList;
    for (std::uint64_t i = 0; i < count; ++i) reply.items.push_back(read_part(depth + 1, budget, deadline));
    return reply;
}

}  // namespace lmcache
