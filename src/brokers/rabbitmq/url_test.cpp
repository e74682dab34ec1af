#include <gtest/gtest.h>

#include "brokers/rabbitmq/rabbitmq.hpp"

namespace semel::brokers::rabbitmq {
namespace {

TEST(RabbitmqUrl, has_defaults_and_decodes_what_is_encoded) {
    const auto plain = parse_url("amqp://guest:guest@127.0.0.1:5673/");
    ASSERT_TRUE(plain);
    EXPECT_FALSE(plain->tls);
    EXPECT_EQ(plain->host, "127.0.0.1");
    EXPECT_EQ(plain->port, 5673);
    EXPECT_EQ(plain->vhost, "/") << "as everybody means it";
    const auto all = parse_url("amqps://a%40b:p%3a%2F%40@[::1]/%2fshop");
    ASSERT_TRUE(all) << all.error().detail;
    EXPECT_TRUE(all->tls);
    EXPECT_EQ(all->host, "::1");
    EXPECT_EQ(all->port, 5671);
    EXPECT_EQ(all->user, "a@b");
    EXPECT_EQ(all->password, "p:/@");
    EXPECT_EQ(all->vhost, "/shop");
    const auto bare = parse_url("amqp://rabbit");
    ASSERT_TRUE(bare);
    EXPECT_EQ(bare->user, "guest");
    EXPECT_EQ(bare->vhost, "/");
}

TEST(RabbitmqUrl, what_is_wrong_is_refused_without_the_password) {
    for (const char* url :
         {"http://u:s3cret@h/", "amqp://", "amqp://u:s3cret@h:0/", "amqp://u:s3cret@h:port/",
          "amqp://u:s3cret%@h/", "amqp://u:s3cret@h/a/b", "amqp://u:s3cret@[::1/",
          "amqp://u:s3cret@h:70000/", "amqp://u:s3cret@h/a%2"}) {
        const auto parsed = parse_url(url);
        ASSERT_FALSE(parsed) << url;
        EXPECT_EQ(parsed.error().detail.find("s3cret"), std::string::npos);
    }
}

TEST(RabbitmqSource, refuses_what_cannot_work) {
    EXPECT_FALSE(make_source({.url = "amqp://h/", .queue = ""}));
    const auto unlimited = make_source({.url = "amqp://h/", .queue = "q", .prefetch = 0});
    ASSERT_FALSE(unlimited);
    EXPECT_NE(unlimited.error().detail.find("no limit"), std::string::npos);
    EXPECT_FALSE(make_source({.url = "amqp://h/",
                              .queue = "q",
                              .declare = QueueDeclaration{.quorum = false, .delivery_limit = 3}}));
}

}  // namespace
}  // namespace semel::brokers::rabbitmq
