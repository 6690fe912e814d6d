#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <tuple>

#include "bindings.h"
#include "lmcache/resp_client.h"

namespace lmcache {

// Texts are bytes, an error is a str.
static nb::object reply_object(const RespReply& reply) {
    switch (reply.kind) {
        case RespReply::Kind::kNull:
            return nb::none();
        case RespReply::Kind::kNumber:
            return nb::int_(reply.number);
        case RespReply::Kind::kText:
            return nb::bytes(reply.text.data(), reply.text.size());
        case RespReply::Kind::kError:
            return nb::steal(
                PyUnicode_DecodeUTF8(reply.text.data(), static_cast<Py_ssize_t>(reply.text.size()), "replace"));
        case RespReply::Kind::kList:
            break;
    }
    nb::list items;
    for (const RespReply& item : reply.items) items.append(reply_object(item));
    return items;
}

static nb::object detail_of(const RespResults& results) {
    if (results.reply) return reply_object(*results.reply);
    if (!results.page) return nb::none();
    const RespPage& page = *results.page;
    return nb::make_tuple(page.cursor, packed(page.keys), typed(page.sizes), typed(page.idle_seconds));
}

static nb::tuple completion(std::uint64_t job, const RespResults& results) {
    return nb::make_tuple(job, typed(results.values), typed(results.errors), detail_of(results));
}

}  // namespace lmcache

namespace {

using lmcache::RespAddress;
using lmcache::RespClient;
using lmcache::RespClientOptions;

std::vector<std::byte> key_bytes(nb::handle keys) {
    const PackedView<std::byte> view(keys, "keys");
    return {view.data(), view.data() + view.size()};
}

std::vector<std::string> texts(const nb::list& arguments) {
    std::vector<std::string> found;
    for (const nb::handle argument : arguments) {
        const PackedView<char> view(argument, "an argument");
        found.emplace_back(view.data(), view.size());
    }
    return found;
}

void bind_submissions(nb::class_<RespClient>& client) {
    client
        .def(
            "submit_store",
            [](RespClient& self, nb::handle keys, const nb::list& buffers) {
                Ranges ranges(buffers);
                auto names = key_bytes(keys);
                nb::gil_scoped_release released;
                return self.submit_store(std::move(names), std::move(ranges.addresses), std::move(ranges.sizes));
            },
            nb::arg("keys"), nb::arg("buffers"))
        .def(
            "submit_load",
            [](RespClient& self, nb::handle keys, const nb::list& buffers) {
                Ranges ranges(buffers);
                auto names = key_bytes(keys);
                nb::gil_scoped_release released;
                return self.submit_load(std::move(names), std::move(ranges.addresses), std::move(ranges.sizes));
            },
            nb::arg("keys"), nb::arg("buffers"))
        .def(
            "submit_sizes", [](RespClient& self, nb::handle keys) { return self.submit_sizes(key_bytes(keys)); },
            nb::arg("keys"))
        .def(
            "submit_delete", [](RespClient& self, nb::handle keys) { return self.submit_delete(key_bytes(keys)); },
            nb::arg("keys"))
        .def("submit_scan", &RespClient::submit_scan, nb::arg("node"), nb::arg("cursor"))
        .def("submit_sweep_parts", &RespClient::submit_sweep_parts, nb::arg("node"), nb::arg("cursor"))
        .def(
            "submit_command",
            [](RespClient& self, const nb::list& arguments, std::optional<std::uint32_t> node) {
                return self.submit_command(texts(arguments), node);
            },
            nb::arg("arguments"), nb::arg("node") = nb::none());
}

}  // namespace

void bind_resp(nb::module_& m) {
    nb::class_<RespClient> client(m, "RespClient");
    bind_completions(client);
    bind_submissions(client);
    client
        .def(
            "__init__",
            [](RespClient* self, unsigned threads, std::string prefix, std::string username, std::string password,
               unsigned database, bool no_touch, double timeout_seconds, std::uint64_t max_value_bytes, bool tls,
               std::string tls_ca, std::string tls_cert, std::string tls_key, std::string tls_server_name) {
                RespClientOptions options;
                options.threads = threads;
                options.prefix = std::move(prefix);
                options.credentials = {std::move(username), std::move(password), database, no_touch};
                options.tls = {tls, std::move(tls_ca), std::move(tls_cert), std::move(tls_key),
                               std::move(tls_server_name)};
                options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_seconds * 1000));
                options.max_value_bytes = max_value_bytes;
                new (self) RespClient(std::move(options));
            },
            nb::kw_only(), nb::arg("threads"), nb::arg("prefix"), nb::arg("username"), nb::arg("password"),
            nb::arg("database"), nb::arg("no_touch"), nb::arg("timeout_seconds"), nb::arg("max_value_bytes"),
            nb::arg("tls"), nb::arg("tls_ca"), nb::arg("tls_cert"), nb::arg("tls_key"), nb::arg("tls_server_name"))
        .def(
            "assign_nodes",
            [](RespClient& self, const std::vector<std::pair<std::string, std::uint16_t>>& addresses,
               const std::vector<std::tuple<std::uint16_t, std::uint16_t, std::uint32_t>>& slots) {
                std::vector<RespAddress> nodes;
                for (const auto& [host, port] : addresses) nodes.push_back({host, port});
                std::vector<lmcache::RespSlotRange> ranges;
                for (const auto& [first, last, node] : slots) ranges.push_back({first, last, node});
                return self.nodes().assign(nodes, ranges);
            },
            nb::arg("addresses"), nb::arg("slots"))
        .def(
            "wait",
            [](RespClient& self, std::uint64_t job, double timeout_seconds) -> nb::object {
                std::optional<lmcache::RespResults> results;
                {
                    nb::gil_scoped_release released;
                    results = self.wait(job, timeout_seconds);
                }
                if (!results) return nb::none();
                return completion(job, *results);
            },
            nb::arg("job"), nb::arg("timeout_seconds"))
        .def("last_error", &RespClient::last_error)
        .def("changes", &RespClient::changes)
        .def("connections", &RespClient::connections);
}
