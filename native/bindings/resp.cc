#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

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

// What Python gets of the results beside their numbers: a page, a reply or None.
struct RespDetail {
    std::optional<RespPage> page;
    std::optional<RespReply> reply;
};

static nb::object detail_object(const RespDetail& detail) {
    if (detail.reply) return reply_object(*detail.reply);
    if (!detail.page) return nb::none();
    const RespPage& page = *detail.page;
    return nb::cast(std::tuple(page.cursor, AsBytes{std::span(page.keys)}, AsNumbers{std::span(page.sizes)},
                               AsNumbers{std::span(page.idle_seconds)}));
}

static auto completion(std::uint64_t job, RespResults&& results) {
    return std::tuple(job, AsNumbers{std::move(results.values)}, AsNumbers{std::move(results.errors)},
                      RespDetail{std::move(results.page), std::move(results.reply)});
}

}  // namespace lmcache

template <>
struct nanobind::detail::type_caster<lmcache::RespDetail> {
    NB_TYPE_CASTER(lmcache::RespDetail, const_name("typing.Any"))
    static handle from_cpp(const lmcache::RespDetail& detail, rv_policy, cleanup_list*) {
        return lmcache::detail_object(detail).release();
    }
};

namespace {

using lmcache::RespAddress;
using lmcache::RespClient;
using lmcache::RespClientOptions;

using Keys = Packed<std::byte, "keys">;
using Arguments = Annotated<"list[bytes]">;

std::vector<std::string> texts(const Arguments& arguments) {
    std::vector<std::string> found;
    for (const nb::handle argument : nb::cast<nb::list>(arguments.object)) {
        Packed<char, "an argument"> view;
        view.hold(argument);
        found.emplace_back(view.data(), view.size());
    }
    return found;
}

void bind_submissions(nb::class_<RespClient>& client) {
    client
        .def(
            "submit_store",
            [](RespClient& self, const Keys& keys, Ranges buffers) {
                return self.submit_store(keys, std::move(buffers.addresses), std::move(buffers.sizes));
            },
            nb::arg("keys"), nb::arg("buffers"), ReleaseGil())
        .def(
            "submit_load",
            [](RespClient& self, const Keys& keys, Ranges buffers) {
                return self.submit_load(keys, std::move(buffers.addresses), std::move(buffers.sizes));
            },
            nb::arg("keys"), nb::arg("buffers"), ReleaseGil(), "EBADMSG for what is not the whole frame of its key.")
        .def(
            "submit_sizes", [](RespClient& self, const Keys& keys) { return self.submit_sizes(keys); }, nb::arg("keys"))
        .def(
            "submit_delete", [](RespClient& self, const Keys& keys) { return self.submit_delete(keys); },
            nb::arg("keys"), "Values: 1 where there was one, else 0.")
        .def("submit_scan", &RespClient::submit_scan, nb::arg("node"), nb::arg("cursor"),
             "Detail: (next cursor, keys, u64 sizes, u64 idle seconds).")
        .def("submit_sweep_parts", &RespClient::submit_sweep_parts, nb::arg("node"), nb::arg("cursor"))
        .def("submit_sweep_orphans", &RespClient::submit_sweep_orphans, nb::arg("node"), nb::arg("cursor"))
        .def(
            "submit_command",
            [](RespClient& self, const Arguments& arguments, std::optional<std::uint32_t> node) {
                return self.submit_command(texts(arguments), node);
            },
            nb::arg("arguments"), nb::arg("node") = nb::none(),
            "Detail: the reply; texts are bytes, an error of the server is a str.");
}

}  // namespace

void bind_resp(nb::module_& m) {
    nb::class_<RespClient> client(
        m, "RespClient",
        "Frames to and from Redis or Valkey (RESP2) on native threads, with a connection each to each server. `keys`: "
        "64 bytes an object, the digest of its namespace and its chunk hash. Submissions return a job number.");
    client
        .def(
            "__init__",
            [](RespClient* self, unsigned threads, std::string prefix, std::string username, std::string password,
               unsigned database, bool no_touch, double timeout_seconds, std::uint64_t max_value_bytes, bool tls,
               std::string tls_ca, std::string tls_cert, std::string tls_key, std::string tls_server_name,
               std::string username_file, std::string password_file) {
                RespClientOptions options;
                options.threads = threads;
                options.prefix = std::move(prefix);
                options.credentials = {std::move(username),      std::move(password),     database, no_touch,
                                       std::move(username_file), std::move(password_file)};
                options.tls = {tls, std::move(tls_ca), std::move(tls_cert), std::move(tls_key),
                               std::move(tls_server_name)};
                options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_seconds * 1000));
                options.max_value_bytes = max_value_bytes;
                new (self) RespClient(std::move(options));
            },
            nb::kw_only(), nb::arg("threads"), nb::arg("prefix"), nb::arg("username"), nb::arg("password"),
            nb::arg("database"), nb::arg("no_touch"), nb::arg("timeout_seconds"), nb::arg("max_value_bytes"),
            nb::arg("tls"), nb::arg("tls_ca"), nb::arg("tls_cert"), nb::arg("tls_key"), nb::arg("tls_server_name"),
            nb::arg("username_file") = "", nb::arg("password_file") = "",
            "Does not connect. `username_file`, `password_file`: read for each connection, in place of the others. "
            "RuntimeError where TLS cannot be had. `no_touch`: what is read does not count as a use.")
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
            nb::arg("addresses"), nb::arg("slots"),
            "A host that begins with \"/\" is the path of a Unix socket. `slots`: first and last (included) of a "
            "cluster, and the position of their server; [] where the first server has everything.")
        .def(
            "wait",
            [](RespClient& self, std::uint64_t job, double timeout_seconds) {
                using Completion = decltype(completion(job, lmcache::RespResults()));
                auto results = self.wait(job, timeout_seconds);
                return results ? std::optional<Completion>(completion(job, std::move(*results))) : std::nullopt;
            },
            nb::arg("job"), nb::arg("timeout_seconds"), ReleaseGil(), "One job; None when it still runs.")
        .def("last_error", &RespClient::last_error)
        .def("changes", &RespClient::changes)
        .def("connections", &RespClient::connections);
    bind_submissions(client);
    bind_completions(client,
                     "Jobs that have ended: (job, i64 value per object, i32 errno per object, detail). Value: bytes "
                     "moved or held, -1 with errno on failure.");
}
