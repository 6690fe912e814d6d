// The client against servers that misbehave: a thread that answers with what a test says.
#include "lmcache/resp_client.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "await_job.h"
#include "check.h"

using namespace std::string_literals;
using lmcache::RespClient;

namespace {

constexpr std::size_t kRoom = 8192;

int times(std::string_view text, std::string_view word) {
    int found = 0;
    for (std::size_t at = 0; (at = text.find(word, at)) != std::string_view::npos; at += word.size()) ++found;
    return found;
}

// Answers each read of a connection with the next of its answers, the greeting apart; then closes it.
class FakeServer {
public:
    explicit FakeServer(std::vector<std::string> answers, bool closes = true)
        : answers_(std::move(answers)), closes_(closes) {
        listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof address;
        CHECK(::bind(listener_, reinterpret_cast<sockaddr*>(&address), size) == 0 && ::listen(listener_, 16) == 0);
        CHECK(::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
        port = ntohs(address.sin_port);
        thread_ = std::thread([this] { serve(); });
    }
    ~FakeServer() {
        stopping_ = true;
        ::shutdown(listener_, SHUT_RDWR);
        thread_.join();
        ::close(listener_);
    }
    std::uint16_t port = 0;
    std::atomic<int> connections{0}, closed{0};
    std::atomic<int> reads_at_once{0};  // of manifests, in the first piece that has any

private:
    void serve() {
        for (;;) {
            const int peer = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
            if (peer < 0) return;
            ++connections;
            answer(peer);
            ::close(peer);
            ++closed;
        }
    }
    void answer(int peer) {
        std::size_t next = 0;
        bool is_greeted = false;
        std::string seen;
        while (!stopping_) {
            pollfd ready{peer, POLLIN, 0};
            if (::poll(&ready, 1, 20) == 0) continue;
            char buffer[65536];
            const ssize_t got = ::recv(peer, buffer, sizeof buffer, 0);
            if (got <= 0) return;
            seen.assign(buffer, static_cast<std::size_t>(got));
            if (reads_at_once == 0) reads_at_once = times(seen, "GETRANGE");
            std::string reply;
            if (!is_greeted) {
                is_greeted = true;
                reply = "+OK\r\n";
            } else if (next < answers_.size()) {
                reply = answers_[next++];
            }
            CHECK(::send(peer, reply.data(), reply.size(), MSG_NOSIGNAL) >= 0);
            if (closes_ && is_greeted && next == answers_.size() && !reply.empty() && reply != "+OK\r\n") return;
        }
    }

    const std::vector<std::string> answers_;
    const bool closes_;
    int listener_ = -1;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

lmcache::RespClientOptions options() {
    lmcache::RespClientOptions made;
    made.threads = 1;
    made.prefix = "t";
    made.timeout = std::chrono::seconds(3);
    return made;
}

struct Client {
    explicit Client(const FakeServer& server) : client(options()) {
        client.nodes().assign(std::vector<lmcache::RespAddress>{{"127.0.0.1", server.port}}, {});
    }
    int load() {
        const auto address = reinterpret_cast<std::uint64_t>(memory.data() + 4096);
        const auto results = wait_for(client, client.submit_load(key, {address}, {kRoom}));
        for (std::size_t i = 0; i < 4096; ++i)  // what is around the memory that was given
            CHECK(memory[i] == std::byte{0xaa} && memory[4096 + kRoom + i] == std::byte{0xaa});
        return results.errors[0];
    }
    std::vector<std::byte> key = std::vector<std::byte>(lmcache::kObjectKeyBytes);
    std::vector<std::byte> memory = std::vector<std::byte>(2 * 4096 + kRoom, std::byte{0xaa});
    RespClient client;
};

int load_answered(const std::string& answer) {
    FakeServer server({answer});
    return Client(server).load();
}

TEST_CASE(what_is_no_frame_is_no_hit) {
    CHECK(load_answered("$-1\r\n") == ENOENT);
    CHECK(load_answered("$5\r\nhello\r\n") == EBADMSG);
    CHECK(load_answered("$0\r\n\r\n") == EBADMSG);
    CHECK(load_answered("$64\r\n" + std::string(64, 'x') + "\r\n") == EBADMSG);
    CHECK(load_answered("-WRONGTYPE Operation against a key\r\n") == EBADMSG);
}

TEST_CASE(a_larger_value_than_the_memory_is_never_written_beyond_it) {
    CHECK(load_answered("$20000\r\n" + std::string(20000, 'x') + "\r\n") == EBADMSG);
}

TEST_CASE(truncated_answers_fail) {
    for (const std::string& answer :
         {"$"s, "$8192"s, "$8192\r"s, "$8192\r\n"s, "$8192\r\nabc"s, "$3\r\nabc"s, "$3\r\nabc\r"s})
        CHECK(load_answered(answer) == ECONNRESET);
}

TEST_CASE(what_is_not_the_protocol_fails) {
    for (const std::string& answer :
         {"HTTP/1.1 400 Bad Request\r\n"s, "$x\r\n"s, "$-2\r\n"s, "$99999999999999999999\r\n"s, "$\r\n"s, "\r\n"s,
          "$3\n"s, "$3\r\nabcd\r\n"s, "$9000000000000000000\r\nabc"s, ":5\r\n"s, "*1\r\n$1\r\nx\r\n"s, "+OK\r\n "s,
          std::string(20000, 'x'), "$ 3\r\n"s, "$+3\r\n"s})
        CHECK(load_answered(answer) == EPROTO);
}

TEST_CASE(errors_of_the_server_are_told_apart) {
    CHECK(load_answered("-LOADING Redis is loading the dataset in memory\r\n") == EAGAIN);
    CHECK(load_answered("-CLUSTERDOWN Hash slot not served\r\n") == EAGAIN);
    CHECK(load_answered("-NOAUTH Authentication required.\r\n") == EACCES);
    CHECK(load_answered("-NOPERM this user has no permissions\r\n") == EACCES);
    CHECK(load_answered("-READONLY You can't write against a read only replica.\r\n") == EROFS);
    CHECK(load_answered("-OOM command not allowed when used memory > 'maxmemory'.\r\n") == ENOSPC);
    CHECK(load_answered("-OOMPH\r\n") == EIO && load_answered("-\r\n") == EIO);
}

TEST_CASE(a_server_that_says_nothing_costs_the_timeout) {
    FakeServer server({}, false);
    Client client(server);
    const auto began = std::chrono::steady_clock::now();
    CHECK(client.load() == ETIMEDOUT);
    CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(20));
}

TEST_CASE(a_deadline_ends_an_answer_that_never_pauses) {
    constexpr std::size_t kBytes = 256 << 10;
    FakeServer server({std::string(4 * kBytes, 'x')}, false);
    const auto later = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    lmcache::EventFd stop;
    lmcache::RespStream stream({"127.0.0.1", server.port}, nullptr, stop.get(), later);
    std::string word = "x";
    std::vector<std::byte> memory(kBytes);
    iovec parts{word.data(), word.size()};
    stream.write({&parts, 1}, later);
    CHECK(stream.read_line(later) == "+OK");
    parts = {word.data(), word.size()};
    stream.write({&parts, 1}, later);
    stream.read(memory.data(), kBytes, later);
    int error = 0;
    try {
        stream.read(memory.data(), kBytes, std::chrono::steady_clock::now());  // has arrived by now
    } catch (const lmcache::RespFault& fault) {
        error = fault.error;
    }
    CHECK(error == ETIMEDOUT);
}

TEST_CASE(closing_ends_what_waits) {
    FakeServer server({}, false);
    auto slow = options();
    slow.timeout = std::chrono::hours(1);
    RespClient client(slow);
    client.nodes().assign(std::vector<lmcache::RespAddress>{{"127.0.0.1", server.port}}, {});
    const auto job = client.submit_sizes(std::vector<std::byte>(lmcache::kObjectKeyBytes));
    while (server.connections == 0) std::this_thread::yield();
    client.close();
    const auto ended = client.drain();
    CHECK(ended.size() == 1 && ended[0].job == job && ended[0].results.errors[0] == ECANCELED);
    CHECK(refused([&] { client.submit_sizes({}); }));
}

TEST_CASE(a_connection_that_was_closed_meanwhile_is_made_again_once) {
    FakeServer server({"$-1\r\n"});  // then it closes
    Client client(server);
    CHECK(client.load() == ENOENT);
    CHECK(client.load() == ENOENT);
    CHECK(server.connections == 2);
}

TEST_CASE(a_server_that_is_away_is_left_alone_for_a_while) {
    std::uint16_t port = 0;
    {
        FakeServer gone({});
        port = gone.port;
    }
    RespClient client(options());
    client.nodes().assign(std::vector<lmcache::RespAddress>{{"127.0.0.1", port}}, {});
    const std::vector<std::byte> key(lmcache::kObjectKeyBytes);
    CHECK(wait_for(client, client.submit_sizes(key)).errors[0] == ECONNREFUSED);
    CHECK(wait_for(client, client.submit_sizes(key)).errors[0] == EHOSTDOWN);
    CHECK(client.changes() == 1 && !client.last_error().empty());
}

TEST_CASE(redirects_do_not_go_round_for_ever) {
    std::vector<std::string> moved(20, "-MOVED 0 :1\r\n");
    FakeServer server(moved, false);
    moved.assign(20, "-MOVED 0 127.0.0.1:" + std::to_string(server.port) + "\r\n");
    FakeServer other(moved, false);
    Client client(other);
    const int error = client.load();
    CHECK(error == ECONNREFUSED || error == EAGAIN || error == EHOSTDOWN);
}

TEST_CASE(a_cursor_that_is_no_number_fails_the_page_alone) {
    for (const std::string& cursor : {"99999999999999999999"s, ""s, "-1"s, "1x"s}) {
        FakeServer server({"*2\r\n$" + std::to_string(cursor.size()) + "\r\n" + cursor + "\r\n*0\r\n"});
        Client client(server);
        CHECK(wait_for(client.client, client.client.submit_scan(0, 0)).errors[0] == EPROTO);
    }
}

// Answers to the search of a page for parts that do not expire: 30 of as many objects.
std::vector<std::string> page_of_parts() {
    constexpr int kParts = 30;
    std::string names, lives;
    for (int i = 0; i < kParts; ++i) {
        const lmcache::RespManifest manifest = lmcache::RespManifest::make(8192, 4096);
        std::vector<std::byte> key(lmcache::kObjectKeyBytes, std::byte(i));
        const std::string name =
            manifest.part_name("t", lmcache::ObjectKeyView(key.data(), lmcache::kObjectKeyBytes), 0);
        names += "$" + std::to_string(name.size()) + "\r\n" + name + "\r\n";
        lives += ":-1\r\n";
    }
    return {"*2\r\n$1\r\n0\r\n*" + std::to_string(kParts) + "\r\n" + names, lives};
}

std::string repeated(const std::string& answer, int times) {
    std::string all;
    for (int i = 0; i < times; ++i) all += answer;
    return all;
}

TEST_CASE(a_page_of_parts_takes_a_round_trip_for_each_step) {
    auto answers = page_of_parts();
    answers.push_back(repeated("$-1\r\n", 30));
    answers.push_back(repeated(":1\r\n", 29) + ":0\r\n");
    FakeServer server(answers, false);
    Client client(server);
    const auto results = wait_for(client.client, client.client.submit_sweep_orphans(0, 0));
    CHECK(results.errors[0] == 0 && results.values[0] == 30);
    CHECK(server.connections == 1 && server.reads_at_once == 30);
}

TEST_CASE(a_page_of_parts_has_one_deadline) {
    FakeServer server(page_of_parts(), false);  // of the manifests it says nothing
    auto slow = options();
    slow.timeout = std::chrono::seconds(2);
    RespClient client(slow);
    client.nodes().assign(std::vector<lmcache::RespAddress>{{"127.0.0.1", server.port}}, {});
    CHECK(wait_for(client, client.submit_sweep_orphans(0, 0)).errors[0] == ETIMEDOUT);
    CHECK(server.connections == 1);
}

TEST_CASE(a_server_that_names_nodes_without_end_fails_its_commands_alone) {
    const std::size_t named = lmcache::RespNodes::kMaxNodes + 2;
    std::vector<std::string> moved;
    for (std::size_t i = 0; i < named; ++i) moved.push_back("-MOVED 1 /nowhere:" + std::to_string(i) + "\r\n");
    FakeServer server(moved, false);
    Client client(server);
    std::size_t refused_to_follow = 0;
    for (std::size_t i = 0; i < named; ++i)
        refused_to_follow += wait_for(client.client, client.client.submit_command({"INFO"}, 0)).errors[0] == EPROTO;
    CHECK(refused_to_follow != 0);
    client.client.nodes().assign(std::vector<lmcache::RespAddress>{{"127.0.0.1", server.port}}, {});
    CHECK(wait_for(client.client, client.client.submit_command({"INFO"}, 0)).errors[0] != EPROTO);
}

TEST_CASE(connections_to_servers_that_are_none_any_more_are_closed) {
    FakeServer gone({"$-1\r\n"}, false), now({"$-1\r\n", "*2\r\n$1\r\n0\r\n*0\r\n"}, false);
    Client client(gone);
    CHECK(client.load() == ENOENT && gone.closed == 0);
    client.client.nodes().assign(std::vector<lmcache::RespAddress>{{"127.0.0.1", now.port}}, {});
    CHECK(client.load() == ENOENT);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (gone.closed == 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    CHECK(gone.closed == 1);
    // Position 0 is the server of the last assignment.
    CHECK(wait_for(client.client, client.client.submit_scan(0, 0)).errors[0] == 0 && gone.connections == 1);
}

TEST_CASE(replies_have_a_limit) {
    const auto ask = [](const std::string& answer) {
        FakeServer server({answer});
        auto patient = options();
        patient.timeout = std::chrono::minutes(1);  // a sanitizer reads more than a million replies in seconds
        RespClient client(patient);
        client.nodes().assign(std::vector<lmcache::RespAddress>{{"127.0.0.1", server.port}}, {});
        return wait_for(client, client.submit_command({"INFO"}, 0));
    };
    std::string deep;
    for (int i = 0; i < 100; ++i) deep += "*1\r\n";
    CHECK(ask(deep + ":1\r\n").errors[0] == EPROTO);
    std::string many = "*1000000000\r\n";
    for (int i = 0; i < 1'500'000; ++i) many += ":1\r\n";
    CHECK(ask(many).errors[0] == EPROTO);
    CHECK(ask("$1000000000\r\n").errors[0] == EPROTO);
    const auto fine = ask("*3\r\n$1\r\nx\r\n:-7\r\n*-1\r\n");
    CHECK(fine.errors[0] == 0 && fine.reply->items.size() == 3 && fine.reply->items[1].number == -7);
    CHECK(ask("-ERR no\r\n").reply->is_error());
}

TEST_CASE(bad_arguments_are_refused_by_the_client) {
    auto none = options();
    none.threads = 0;
    CHECK(refused([&] { RespClient client(none); }));
    auto small = options();
    small.max_value_bytes = 64;
    CHECK(refused([&] { RespClient client(small); }));
    RespClient client(options());
    CHECK(refused([&] { client.submit_sizes(std::vector<std::byte>(63)); }));
    CHECK(refused([&] { client.submit_load(std::vector<std::byte>(64), {}, {}); }));
    CHECK(refused([&] { client.submit_command({}, 0); }));
    CHECK(refused([&] { client.submit_command({"GET"}, std::nullopt); }));
    // A node that nobody named.
    CHECK(wait_for(client, client.submit_scan(3, 0)).errors[0] == EHOSTUNREACH);
    CHECK(wait_for(client, client.submit_sizes(std::vector<std::byte>(64))).errors[0] == EHOSTUNREACH);
    CHECK(wait_for(client, client.submit_sizes({})).errors.empty());
}

}  // namespace
