#include "cli/own_stores.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "base/time.hpp"
#include "stores/memory/memory_store.hpp"

namespace semel::cli {
namespace {

using testing::ElementsAre;

config::Config parsed(const std::string& stores) {
    std::string yaml = "store: { redis: { url: 'redis://main' } }\nconsumers:\n";
    int number = 0;
    std::string line;
    for (std::istringstream lines(stores); std::getline(lines, line); ++number) {
        const std::string n = std::to_string(number);
        yaml += "  - { name: c" + n + ", source: { kafka: { brokers: 'h:1', topics: [t" + n +
                "], group: g" + n + " } }, handler: { http: { url: 'http://h' } }" + line + " }\n";
    }
    const auto config = config::parse(
        yaml, "semel.yaml", [](const std::string&) { return std::optional<std::string>(); });
    EXPECT_TRUE(config) << config.error().detail;
    return config ? *config : config::Config{};
}

/// Opens memory stores, and keeps what it was asked to open.
struct Opening {
    Opening() {
        leaves.open_store = [this](const config::Config& config,
                                   bool) -> base::Result<OpenedStore> {
            if (config.store.redis.url == broken)
                return base::Error{.detail = "redis://broken does not answer"};
            opened.push_back(config.store.redis.url);
            OpenedStore out;
            out.store = stores::make_memory_store(base::system_clocks());
            return out;
        };
    }
    Leaves leaves;
    std::vector<std::string> opened;
    std::string broken;
    telemetry::Metrics metrics;
};

TEST(OwnStores, each_is_opened_once_and_the_process_own_one_not_again) {
    const config::Config config = parsed(
        ", store: { redis: { url: 'redis://a' } }\n"
        ", store: { redis: { url: 'redis://main' } }\n"
        ", store: { redis: { url: 'redis://b' } }\n"
        "\n"
        ", store: { redis: { url: 'redis://a', prefix: semel } }\n"
        ", store: { redis: { url: 'redis://c' } }, mode: observe\n");
    Opening opening;
    OwnStores stores(config, opening.leaves, "owner", opening.metrics);
    ASSERT_TRUE(stores.open(false));
    EXPECT_THAT(opening.opened, ElementsAre("redis://a", "redis://b"));
    const auto of = [&](std::size_t which) { return stores.of(config.consumers[which]); };
    ASSERT_NE(of(0), nullptr);
    ASSERT_NE(of(2), nullptr);
    EXPECT_EQ(of(0), of(4));
    EXPECT_NE(of(0)->store, of(2)->store);
    EXPECT_EQ(of(1), nullptr);
    EXPECT_EQ(of(3), nullptr);
    EXPECT_EQ(of(5), nullptr) << "who observes keeps nothing";
    EXPECT_NE((*of(0)->secret)("k"), (*of(2)->secret)("k"))
        << "each has the secret that it keeps itself, so that all processes on it agree";
    EXPECT_THAT(stores.not_ready(), ElementsAre());
}

TEST(OwnStores, one_that_cannot_be_opened_is_an_error_and_the_others_are_closed) {
    const config::Config config = parsed(
        ", store: { redis: { url: 'redis://a' } }\n"
        ", store: { redis: { url: 'redis://broken' } }\n");
    Opening opening;
    opening.broken = "redis://broken";
    OwnStores stores(config, opening.leaves, "owner", opening.metrics);
    const auto opened = stores.open(false);
    ASSERT_FALSE(opened);
    EXPECT_EQ(opened.error().detail, "redis://broken does not answer");
}

}  // namespace
}  // namespace semel::cli
