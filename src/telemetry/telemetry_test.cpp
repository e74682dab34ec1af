#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <set>
#include <thread>

#include "telemetry/log.hpp"
#include "telemetry/metrics.hpp"

namespace semel::telemetry {
namespace {

using namespace std::chrono_literals;

bool has_line(const std::string& text, const std::string& line) {
    return ("\n" + text).find("\n" + line + "\n") != std::string::npos;
}

TEST(Metrics, renders_what_was_counted_with_its_labels) {
    Metrics metrics;
    metrics.requests(Route::chat_completions, RequestOutcome::executed).add();
    metrics.requests(Route::chat_completions, RequestOutcome::executed).add(2);
    metrics.requests(Route::other, RequestOutcome::served).add();
    metrics.unprotected(Unprotected::no_key).add(4);
    metrics.tokens(Tokens::reasoning).add(17);
    metrics.joiners.add(5);
    metrics.joiners.sub(2);
    metrics.usage_unknown.add();
    const std::string text = metrics.render();
    EXPECT_TRUE(has_line(
        text, "semel_requests_total{route=\"/v1/chat/completions\",outcome=\"executed\"} 3"))
        << text;
    EXPECT_TRUE(has_line(text, "semel_requests_total{route=\"other\",outcome=\"served\"} 1"))
        << text;
    EXPECT_TRUE(has_line(text, "semel_unprotected_total{reason=\"no_key\"} 4")) << text;
    EXPECT_TRUE(has_line(text, "semel_unprotected_total{reason=\"encoding\"} 0")) << text;
    EXPECT_TRUE(has_line(text, "semel_tokens_total{kind=\"reasoning\"} 17")) << text;
    EXPECT_TRUE(has_line(text, "semel_joiners 3")) << text;
    EXPECT_TRUE(has_line(text, "semel_usage_unknown_total 1")) << text;
    EXPECT_TRUE(has_line(text, "semel_build_info{version=\"" SEMEL_VERSION "\"} 1")) << text;
    EXPECT_TRUE(has_line(text, "# TYPE semel_joiners gauge")) << text;
    EXPECT_TRUE(has_line(text, "# TYPE semel_usage_unknown_total counter")) << text;
}

TEST(Metrics, histograms_put_each_duration_into_the_first_bucket_that_holds_it) {
    Metrics metrics;
    metrics.upstream_seconds.observe(1ms);  // on the bound
    metrics.upstream_seconds.observe(1100us);
    metrics.upstream_seconds.observe(45s);
    metrics.upstream_seconds.observe(700s);
    const std::string text = metrics.render();
    EXPECT_TRUE(has_line(text, "semel_upstream_seconds_bucket{le=\"0.001\"} 1")) << text;
    EXPECT_NE(text.find("semel_upstream_seconds_bucket{le=\"30\"} 2"), std::string::npos) << text;
    EXPECT_NE(text.find("semel_upstream_seconds_bucket{le=\"60\"} 3"), std::string::npos) << text;
    EXPECT_NE(text.find("semel_upstream_seconds_bucket{le=\"600\"} 3"), std::string::npos) << text;
    EXPECT_NE(text.find("semel_upstream_seconds_bucket{le=\"+Inf\"} 4"), std::string::npos) << text;
    EXPECT_NE(text.find("semel_upstream_seconds_count 4"), std::string::npos) << text;
    EXPECT_NEAR(metrics.upstream_seconds.sum_seconds(), 745.0021, 1e-6);
}

TEST(Metrics, readers_of_one_name_are_added_up_at_each_scrape) {
    Metrics metrics;
    std::uint64_t of_loop_1 = 3;
    std::uint64_t of_loop_2 = 4;
    metrics.watch("semel_leases", [&] { return of_loop_1; });
    metrics.watch("semel_leases", [&] { return of_loop_2; });
    EXPECT_TRUE(has_line(metrics.render(), "semel_leases 7"));
    of_loop_1 = 10;
    EXPECT_TRUE(has_line(metrics.render(), "semel_leases 14"));
    EXPECT_DEATH(metrics.watch("semel_no_such_metric", [] { return 0ull; }), "documented list");
}

TEST(Metrics, what_consumers_count_carries_their_names) {
    Metrics metrics;
    metrics.watch_consumer("semel_effects_applied_total", "orders", [] { return 3.0; });
    metrics.watch_consumer("semel_effects_applied_total", "stock", [] { return 4.0; });
    metrics.watch_consumer("semel_dead_letters_total", "orders", [] { return 1.0; }, "fatal");
    metrics.watch_consumer("semel_commit_watermark_age_seconds", "orders", [] { return 1.5; });
    const std::string text = metrics.render();
    EXPECT_TRUE(has_line(text, "semel_effects_applied_total{consumer=\"orders\"} 3")) << text;
    EXPECT_TRUE(has_line(text, "semel_effects_applied_total{consumer=\"stock\"} 4")) << text;
    EXPECT_TRUE(has_line(
        text, "semel_dead_letters_total{consumer=\"orders\",class=\"fatal\"} 1"))
        << text;
    EXPECT_TRUE(
        has_line(text, "semel_commit_watermark_age_seconds{consumer=\"orders\"} 1.5"))
        << text;
    EXPECT_TRUE(has_line(text, "# TYPE semel_commit_watermark_age_seconds gauge")) << text;
    EXPECT_DEATH(metrics.watch_consumer("semel_leases", "orders", [] { return 0.0; }),
                 "documented list");
}

TEST(Metrics, counting_from_many_threads_loses_nothing) {
    Metrics metrics;
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&] {
            for (int i = 0; i < 10000; ++i) {
                metrics.requests(Route::api_chat, RequestOutcome::joined).add();
                metrics.first_byte_seconds.observe(3ms);
                if (i % 1000 == 0) EXPECT_FALSE(metrics.render().empty());
            }
        });
    }
    threads.clear();
    EXPECT_EQ(metrics.requests(Route::api_chat, RequestOutcome::joined).value(), 40000u);
    EXPECT_TRUE(has_line(metrics.render(), "semel_first_byte_seconds_count 40000"));
}

TEST(Metrics, the_reference_page_lists_exactly_what_is_rendered) {
    std::ifstream file(SEMEL_METRICS_PAGE);
    ASSERT_TRUE(file) << SEMEL_METRICS_PAGE;
    const std::string page((std::istreambuf_iterator<char>(file)), {});
    const std::regex row("\n\\| `(semel_[a-z0-9_]+)");
    std::set<std::string> documented;
    for (auto it = std::sregex_iterator(page.begin(), page.end(), row);
         it != std::sregex_iterator(); ++it)
        documented.insert((*it)[1]);
    std::set<std::string> in_code;
    for (const std::string_view name : Metrics::names()) in_code.emplace(name);
    EXPECT_EQ(documented, in_code);
    const std::string text = Metrics().render();
    for (const std::string& name : in_code)
        EXPECT_NE(text.find("# HELP " + name + " "), std::string::npos) << name;
}

TEST(Log, no_value_can_forge_a_field_or_a_line) {
    EXPECT_EQ(log::format("lease.lost", {{"key", "abc"},
                                         {"token", std::uint64_t{7}},
                                         {"delta", -3},
                                         {"late", true},
                                         {"share", 0.5}}),
              "lease.lost key=abc token=7 delta=-3 late=true share=0.5");
    EXPECT_EQ(
        log::format(
            "e",
            {{"a", "x y"}, {"b", "x=1"}, {"c", "q\"\\"}, {"d", "line\n2"}, {"e", ""}, {"f", "é"}}),
        "e a=\"x y\" b=\"x=1\" c=\"q\\\"\\\\\" d=\"line\\x0a2\" e=\"\" f=é");
}

TEST(Log, writes_one_line_with_time_and_level_and_drops_what_is_below_the_level) {
    testing::internal::CaptureStderr();
    log::info("started", {{"port", 8787}});
    log::debug("hidden");
    ASSERT_TRUE(log::set_level("debug"));
    log::debug("shown {} braces");
    ASSERT_TRUE(log::set_level("off"));
    log::error("dropped");
    EXPECT_FALSE(log::set_level("loud"));
    log::set_level(log::Level::info);
    const std::string text = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(std::regex_match(
        text,
        std::regex("\\d{4}-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\d\\.\\d{3}Z info started port=8787\n"
                   "[^\n]*Z debug shown \\{\\} braces\n")))
        << text;
}

}  // namespace
}  // namespace semel::telemetry
