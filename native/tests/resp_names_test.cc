#include "lmcache/resp_names.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "lmcache/resp_connection.h"
#include "lmcache/resp_nodes.h"

using lmcache::kObjectKeyBytes;
using lmcache::RespManifest;

namespace {

std::vector<std::byte> make_key() {
    std::vector<std::byte> key(kObjectKeyBytes);
    for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(i * 7);
    return key;
}

TEST_CASE(a_name_gives_its_key_back_and_other_names_none) {
    const auto key = make_key();
    const lmcache::ObjectKeyView view(key.data(), kObjectKeyBytes);
    const std::string name = lmcache::resp_object_name("kv/a", view);
    CHECK(name.size() == 4 + 4 + 64 + 1 + 64 && name.starts_with("kv/a/v1/00070e15"));
    const auto parsed = lmcache::parse_resp_object_name("kv/a", name);
    CHECK(parsed && std::ranges::equal(*parsed, key));
    for (const std::string& other : {std::string(), std::string("kv/a/v1/"), name + "0", name.substr(1), "x" + name,
                                     name.substr(0, name.size() - 1), std::string(name).replace(10, 1, "G"),
                                     std::string(name).replace(72, 1, "-")})
        CHECK(!lmcache::parse_resp_object_name("kv/a", other));
    CHECK(!lmcache::parse_resp_object_name("kv", name));
}

TEST_CASE(a_manifest_survives_and_a_damaged_one_is_none) {
    const RespManifest manifest = RespManifest::make(10'000, 4096);
    CHECK(manifest.parts == 3 && manifest.bytes_of(0) == 4096 && manifest.bytes_of(2) == 10'000 - 8192);
    CHECK(RespManifest::make(8192, 4096).parts == 2);
    CHECK(RespManifest::make(8192, 4096).bytes_of(1) == 4096);
    CHECK(RespManifest::make(10'000, 4096).write_id != manifest.write_id);
    const auto image = manifest.image();
    const auto parsed = RespManifest::parse(image);
    CHECK(parsed && parsed->parts == 3 && parsed->total_bytes == 10'000 && parsed->write_id == manifest.write_id);
    for (std::size_t i = 0; i < image.size(); ++i) {
        auto damaged = image;
        damaged[i] ^= std::byte{1};
        CHECK(!RespManifest::parse(damaged));
    }
    CHECK(!RespManifest::parse(std::span(image).first(63)));
    // Whole, and yet not what anybody writes.
    for (const RespManifest& odd :
         {RespManifest{1, 4096, 4096, {}}, RespManifest{3, 4096, 4096, {}}, RespManifest{2, 0, 10, {}},
          RespManifest{4097, 1, 4097, {}}, RespManifest{2, ~std::uint64_t{0} / 2, ~std::uint64_t{0} - 9, {}}})
        CHECK(!RespManifest::parse(odd.image()));
    const auto key = make_key();
    const std::string part = manifest.part_name("kv", lmcache::ObjectKeyView(key.data(), kObjectKeyBytes), 2);
    CHECK(part.starts_with("kv/v1-parts/") && part.ends_with("/2"));
    CHECK(!lmcache::parse_resp_object_name("kv", part));
}

TEST_CASE(a_name_of_a_part_gives_its_object_and_write_back_and_other_names_none) {
    const auto manifest = lmcache::RespManifest::make(10 << 20, 4 << 20);
    std::vector<std::byte> key(lmcache::kObjectKeyBytes, std::byte{0x5a});
    key[0] = std::byte{1};
    const lmcache::ObjectKeyView view(key.data(), lmcache::kObjectKeyBytes);
    const std::string name = manifest.part_name("kv", view, 4095);
    const auto part = lmcache::parse_resp_part_name("kv", name);
    CHECK(part && std::ranges::equal(part->key, key) && part->write_id == manifest.write_id);
    const std::string folder = name.substr(0, name.size() - 4);
    for (const std::string& odd : {folder, folder + "x", folder + "12345", folder + "-1", name + "/", "x" + name,
                                   "kv/v1-parts/" + std::string(170, 'a'), std::string("kv/v1-parts/theirs")})
        CHECK(!lmcache::parse_resp_part_name("kv", odd));
    CHECK(!lmcache::parse_resp_part_name("k", name));
    CHECK(!lmcache::parse_resp_part_name("kv", lmcache::resp_object_name("kv", view)));
}

TEST_CASE(slots_are_those_of_redis) {
    // From the cluster specification: CRC16 of 123456789 is 0x31C3.
    CHECK(lmcache::resp_slot("123456789") == 0x31C3);
    CHECK(lmcache::resp_slot("foo{}{bar}") == lmcache::resp_slot("foo{}{bar}"));
    CHECK(lmcache::resp_slot("{user1000}.following") == lmcache::resp_slot("user1000"));
    CHECK(lmcache::resp_slot("foo{{bar}}zap") == lmcache::resp_slot("{bar"));
    CHECK(lmcache::resp_slot("foo") == 12182 && lmcache::resp_slot("") == 0);
}

TEST_CASE(redirects_are_read_strictly) {
    const auto moved = lmcache::parse_resp_redirect("MOVED 3999 127.0.0.1:6381");
    CHECK(moved && !moved->is_ask && moved->slot == 3999 && moved->address.host == "127.0.0.1");
    CHECK(moved->address.port == 6381);
    const auto ask = lmcache::parse_resp_redirect("ASK 1 ::1:7000");
    CHECK(ask && ask->is_ask && ask->address.host == "::1" && ask->address.port == 7000);
    CHECK(lmcache::parse_resp_redirect("MOVED 1 :7000")->address.host.empty());
    for (const char* odd : {"MOVED", "MOVED ", "MOVED 1", "MOVED 16384 a:1", "MOVED -1 a:1", "MOVED 1 a",
                            "MOVED 1 a:", "MOVED 1 a:70000", "MOVED 1 ?:7", "MOVED x a:1", "OOM 1 a:1", ""})
        CHECK(!lmcache::parse_resp_redirect(odd));
}

TEST_CASE(nodes_keep_their_index_and_slots_move) {
    lmcache::RespNodes nodes;
    nodes.assign(std::vector<lmcache::RespAddress>{{"a", 1}}, {});
    CHECK(nodes.node_of("foo") == 0 && nodes.address(0).text() == "a:1");
    const std::vector<lmcache::RespAddress> two{{"a", 1}, {"b", 2}};
    const std::vector<lmcache::RespSlotRange> ranges{{0, 8191, 0}, {8192, 16383, 1}};
    nodes.assign(two, ranges);
    CHECK(nodes.node_of("foo") == 1);  // slot 12182
    CHECK(nodes.redirect({false, 12182, {"", 3}}, 1) == 2 && nodes.node_of("foo") == 2);
    CHECK(nodes.address(2).host == "b" && nodes.changes() == 1);
    CHECK(nodes.redirect({true, 12182, {"a", 1}}, 2) == 0 && nodes.node_of("foo") == 2);
    nodes.assign(std::vector<lmcache::RespAddress>{{"b", 2}}, {});
    CHECK(nodes.node_of("foo") == 1 && nodes.node_of("") == 1);
    CHECK(refused([&] { nodes.assign({}, {}); }));
    CHECK(refused([&] { nodes.assign(two, std::vector<lmcache::RespSlotRange>{{5, 4, 0}}); }));
    CHECK(refused([&] { nodes.assign(two, std::vector<lmcache::RespSlotRange>{{0, 1, 2}}); }));
    CHECK(nodes.may_connect(0));
    nodes.connected(0, false);
    CHECK(!nodes.may_connect(0) && nodes.may_connect(1) && nodes.changes() == 2);
}

TEST_CASE(servers_whose_addresses_change_for_years_do_not_fill_the_list_of_nodes) {
    lmcache::RespNodes nodes;
    for (unsigned i = 0; i < 3 * lmcache::RespNodes::kMaxNodes; ++i) {
        const std::vector<lmcache::RespAddress> now{{"a", 1}, {"b" + std::to_string(i), 2}};
        nodes.assign(now, std::vector<lmcache::RespSlotRange>{{0, 8191, 0}, {8192, 16383, 1}});
        CHECK(nodes.node_of("foo") == *nodes.assigned(1) && nodes.address(nodes.node_of("foo")) == now[1]);
        CHECK(*nodes.assigned(0) == 0 && !nodes.assigned(2));
    }
    const std::uint32_t last = *nodes.assigned(1);
    const std::uint64_t tenant = nodes.tenant(last);
    nodes.assign(std::vector<lmcache::RespAddress>{{"a", 1}}, {});
    CHECK(tenant != 0 && nodes.tenant(last) == 0 && nodes.tenant(0) != 0);
}

TEST_CASE(a_pipeline_is_what_the_protocol_says) {
    lmcache::RespPipeline commands;
    const std::byte memory[3] = {std::byte{'x'}, std::byte{0}, std::byte{'y'}};
    commands.add({"SET", "name"}, memory, sizeof memory);
    commands.add({"GET", ""});
    std::string written;
    for (const iovec& part : commands.parts()) written.append(static_cast<const char*>(part.iov_base), part.iov_len);
    using namespace std::string_literals;
    CHECK(written == "*3\r\n$3\r\nSET\r\n$4\r\nname\r\n$3\r\nx\0y\r\n*2\r\n$3\r\nGET\r\n$0\r\n\r\n"s);
}

}  // namespace
