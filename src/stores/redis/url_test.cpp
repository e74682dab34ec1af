#include <gtest/gtest.h>

#include "stores/redis/client.hpp"
#include "stores/redis/refusal.hpp"
#include "stores/redis/wire.hpp"

namespace semel::stores::redis {
namespace {

Target parsed(std::string_view url) {
    auto target = parse_url(url);
    EXPECT_TRUE(target) << url << ": " << (target ? "" : target.error().detail);
    return target ? *target : Target{};
}

TEST(RedisUrl, every_documented_form_is_understood_and_described_without_its_secrets) {
    struct Case {
        const char* url;
        Target::Kind kind;
        const char* user;
        const char* password;
        int database;
        bool tls;
        const char* described;
    };
    using Kind = Target::Kind;
    for (const Case& one : {
             Case{"redis://localhost", Kind::server, "", "", 0, false, "redis://localhost:6379"},
             Case{"redis://10.0.0.7:7000/3", Kind::server, "", "", 3, false,
                  "redis://10.0.0.7:7000/3"},
             Case{"redis://h/", Kind::server, "", "", 0, false, "redis://h:6379"},
             Case{"rediss://me:se%40cr%2Fet@h.example:6380/15", Kind::server, "me", "se@cr/et", 15,
                  true, "rediss://h.example:6380/15"},
             Case{"redis://:pw@h", Kind::server, "", "pw", 0, false, "redis://h:6379"},
             Case{"redis://nopass@h", Kind::server, "nopass", "", 0, false, "redis://h:6379"},
             Case{"redis://[::1]:7000", Kind::server, "", "", 0, false, "redis://[::1]:7000"},
             Case{"unix:///run/redis.sock", Kind::unix_socket, "", "", 0, false,
                  "unix:///run/redis.sock"},
             Case{"unix://u:p@/run/my%20redis.sock?db=2", Kind::unix_socket, "u", "p", 2, false,
                  "unix:///run/my redis.sock?db=2"},
             Case{"redis-sentinel://u:p@a,b:1,[::2]:3/4#main-1", Kind::sentinel, "u", "p", 4, false,
                  "redis-sentinel://a:26379,b:1,[::2]:3/4#main-1"},
             Case{"rediss-sentinel://a#m", Kind::sentinel, "", "", 0, true,
                  "rediss-sentinel://a:26379#m"},
         }) {
        const Target target = parsed(one.url);
        EXPECT_EQ(target.kind, one.kind) << one.url;
        EXPECT_EQ(target.user, one.user) << one.url;
        EXPECT_EQ(target.password, one.password) << one.url;
        EXPECT_EQ(target.database, one.database) << one.url;
        EXPECT_EQ(target.tls, one.tls) << one.url;
        EXPECT_EQ(describe(target), one.described);
    }
    const Target sentinels = parsed("redis-sentinel://a,b:1,[::2]:3#main-1");
    ASSERT_EQ(sentinels.addresses.size(), 3U);
    EXPECT_EQ(sentinels.addresses[2].host, "::2");
    EXPECT_EQ(sentinels.master_name, "main-1");
}

TEST(RedisUrl, everything_odd_is_refused_in_words_that_repeat_nothing_of_it) {
    const std::string secret = "hunter2";
    for (const std::string url : {
             "",
             "redis",
             "redis:",
             "redis:/",
             "redis://",
             "redis:///",
             "redis://:6379",
             "http://h",
             "REDIS://h",
             " redis://h",
             "redis://h ",
             "redis://h:0",
             "redis://h:65536",
             "redis://h:",
             "redis://h:+1",
             "redis://h:01",
             "redis://h:6379x",
             "redis://h/x",
             "redis://h/-1",
             "redis://h/1/2",
             "redis://h/01",
             "redis://h/1000001",
             "redis://h?db=1",
             "redis://h/1?db=1",
             "redis://h#m",
             "redis://@h",
             "redis://:@h",
             "redis://u:hunter2:x@h",
             "redis://u:hunter2@x@h",
             "redis://u:hunter2/x@h",
             "redis://u:hunter2?x@h",
             "redis://u:hunter2#x@h",
             "redis://u:hunter2%@h",
             "redis://u:hunter2%4@h",
             "redis://u:hunter2%zz@h",
             "redis://u:hunter2@",
             "redis://a,b",
             "redis://[::1",
             "redis://[]",
             "redis://[h]",
             "redis://[::1]x",
             "redis://::1",
             "redis://h\n",
             "redis://h\xc3\xa4",
             "redis://h_/\x01",
             "unix://",
             "unix:///",
             "unix://h/p",
             "unix:///p?x=1",
             "unix:///p?db=x",
             "unix:///p?db=1&x",
             "unix:///p#m",
             "unix:///p%00q",
             "redis-sentinel://a",
             "redis-sentinel://a#",
             "redis-sentinel://#m",
             "redis-sentinel://a,#m",
             "redis-sentinel://,a#m",
             "redis-sentinel://a#m m",
             "redis-sentinel://a#m/1",
             "redis-sentinel://u:hunter2@a,v:hunter2@b#m",
             "valkey://h",
         }) {
        const auto target = parse_url(url);
        ASSERT_FALSE(target) << url;
        EXPECT_EQ(target.error().code, base::ErrorCode::invalid_argument) << url;
        EXPECT_TRUE(target.error().detail.starts_with("the Redis URL ")) << target.error().detail;
        EXPECT_EQ(target.error().detail.find(secret), std::string::npos) << target.error().detail;
    }
    EXPECT_FALSE(parse_url("redis://" + std::string(300, 'h')));
    EXPECT_FALSE(parse_url("redis://h/" + std::string(5000, '1')));
    EXPECT_FALSE(parse_url("unix:///" + std::string(200, 's')));
    EXPECT_FALSE(parse_url(std::string("redis://h\0x", 11)));
    std::string many = "redis-sentinel://s";
    for (int i = 0; i < 64; ++i) many += ",s";
    EXPECT_FALSE(parse_url(many + "#m"));
}

TEST(RedisWire, slots_are_the_servers_own) {
    EXPECT_EQ(slot_of("123456789"), 12739);  // as the Cluster specification says
    EXPECT_EQ(slot_of("foo"), 12182);
    EXPECT_EQ(slot_of("{foo}.bar"), 12182);
    EXPECT_EQ(slot_of("a{foo}{b}"), 12182);
    EXPECT_EQ(slot_of(""), 0);
    EXPECT_NE(slot_of("foo{}x"), slot_of("fooy"));  // empty braces count as nothing
}

TEST(RedisWire, replies_are_read_in_whatever_pieces_they_come) {
    const std::string bytes =
        "+OK\r\n-ERR "
        "no\r\n:-42\r\n$-1\r\n$5\r\na\r\nbc\r\n*-1\r\n*3\r\n:1\r\n*2\r\n$0\r\n\r\n+x\r\n$"
        "1\r\nz\r\n*0\r\n";
    for (const std::size_t piece : {bytes.size(), std::size_t{1}, std::size_t{3}}) {
        ReplyReader reader;
        std::vector<Reply> replies;
        for (std::size_t at = 0; at < bytes.size(); at += piece) {
            reader.feed(std::string_view(bytes).substr(at, piece));
            Reply reply;
            while (reader.next(reply) == ReplyReader::Next::reply)
                replies.push_back(std::move(reply));
        }
        ASSERT_EQ(replies.size(), 8U);
        EXPECT_EQ(replies[0].kind, Reply::Kind::status);
        EXPECT_EQ(replies[0].text, "OK");
        EXPECT_EQ(replies[1].kind, Reply::Kind::error);
        EXPECT_EQ(replies[2].integer, -42);
        EXPECT_EQ(replies[3].kind, Reply::Kind::nil);
        EXPECT_EQ(replies[4].text, "a\r\nbc");
        EXPECT_EQ(replies[5].kind, Reply::Kind::nil);
        ASSERT_EQ(replies[6].elements.size(), 3U);
        ASSERT_EQ(replies[6].elements[1].elements.size(), 2U);
        EXPECT_EQ(replies[6].elements[1].elements[1].text, "x");
        EXPECT_EQ(replies[6].elements[2].text, "z");
        EXPECT_EQ(replies[7].kind, Reply::Kind::array);
    }
    for (const std::string_view broken :
         {"HTTP/1.1 400\r\n", "$-5\r\n", "*2000000\r\n", "%1\r\n", "\x15\x03\x01"}) {
        ReplyReader reader;
        reader.feed(broken);
        Reply reply;
        EXPECT_EQ(reader.next(reply), ReplyReader::Next::broken) << broken;
        EXPECT_FALSE(reader.problem().empty());
    }
}

TEST(RedisRefusal, each_error_reply_has_its_cure_and_no_argument_is_repeated) {
    const auto cure = [](std::string_view error) { return judge(error, "h:1", "acquire").cure; };
    EXPECT_EQ(cure("NOSCRIPT No matching script."), Cure::send_source);
    EXPECT_EQ(cure("MOVED 1 h:2"), Cure::follow);
    EXPECT_EQ(cure("ASK 1 h:2"), Cure::ask);
    EXPECT_EQ(cure("CLUSTERDOWN The cluster is down"), Cure::ask_others);
    for (const char* error :
         {"TRYAGAIN x", "LOADING x", "MASTERDOWN x", "BUSY x", "NOREPLICAS x", "MISCONF x"})
        EXPECT_EQ(cure(error), Cure::later) << error;
    EXPECT_EQ(cure("OOM command not allowed when used memory > 'maxmemory'. script: 12, on "
                   "@user_script:4."),
              Cure::full);
    EXPECT_EQ(
        cure(
            "READONLY You can't write against a read only replica. script: 12, on @user_script:4."),
        Cure::find_master);
    EXPECT_EQ(
        cure("ERR user_script:1: attempt to index a nil value script: 12, on @user_script:1."),
        Cure::uncertain);
    EXPECT_EQ(cure("WRONGTYPE Operation against a key script: 12, on @user_script:4."),
              Cure::uncertain);
    EXPECT_EQ(cure("WRONGTYPE Operation against a key"), Cure::none);
    EXPECT_EQ(cure("BUSYKEY Target key name already exists."), Cure::none);
    EXPECT_EQ(cure("NOPERM this user has no permissions"), Cure::none);
    EXPECT_EQ(cure(""), Cure::none);
    const Refusal unknown =
        judge("ERR unknown command 'x', with args beginning with: 'the-key' ", "h:1", "x");
    EXPECT_EQ(unknown.sentence, "the server h:1 refused x (ERR unknown command 'x')");
}

TEST(RedisRefusal, a_redirection_names_slot_and_server) {
    const auto to = redirection("MOVED 3999 127.0.0.1:6381", "me");
    ASSERT_TRUE(to);
    EXPECT_EQ(to->slot, 3999);
    EXPECT_EQ(name_of(to->to), "127.0.0.1:6381");
    EXPECT_EQ(name_of(redirection("ASK 1 :6381", "me")->to), "me:6381");
    EXPECT_EQ(name_of(redirection("ASK 1 ::1:6381", "me")->to), "[::1]:6381");
    for (const char* odd : {"MOVED", "MOVED 1", "MOVED x h:1", "MOVED 16384 h:1", "MOVED 1 h",
                            "MOVED 1 h:", "MOVED 1 h:70000", "MOVED 1 h:1 x"})
        EXPECT_FALSE(redirection(odd, "me")) << odd;
}

}  // namespace
}  // namespace semel::stores::redis
