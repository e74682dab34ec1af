#include "consumer/strategies/sql_template.hpp"

#include <gtest/gtest.h>

#include "consumer/strategies/db_workers.hpp"

namespace semel::consumer {
namespace {

using sql::Dialect;

const std::vector<std::string> names{"sku", "qty", "paid"};

base::Result<SqlTemplate> parse(Dialect dialect, std::string_view text) {
    return SqlTemplate::parse(dialect, text, names, "statement 1");
}
sql::Statement bound(Dialect dialect, std::string_view text) {
    auto parsed = parse(dialect, text);
    if (!parsed) {
        ADD_FAILURE() << parsed.error().detail;
        return {};
    }
    const std::vector<Extracted> values{
        {.text = "a-1"}, {.text = "2.5E+1", .number = true}, {.text = "true", .boolean = true}};
    return parsed->bind(values);
}
std::string refusal(Dialect dialect, std::string_view text) {
    auto parsed = parse(dialect, text);
    EXPECT_FALSE(parsed) << text;
    return parsed ? std::string() : parsed.error().detail;
}
std::string text_of(const sql::Parameter& parameter) {
    const auto* text = std::get_if<std::string>(&parameter);
    return text != nullptr ? *text : "(no text)";
}

TEST(SqlTemplate, each_place_is_a_parameter_of_its_own) {
    const auto postgres =
        bound(Dialect::postgres, "UPDATE s SET a = a - :qty, b = :qty WHERE sku = :sku");
    EXPECT_EQ(postgres.text, "UPDATE s SET a = a - $1, b = $2 WHERE sku = $3");
    ASSERT_EQ(postgres.parameters.size(), 3U);
    EXPECT_EQ(text_of(postgres.parameters[0]), "25");
    EXPECT_EQ(text_of(postgres.parameters[2]), "a-1");
    const auto mysql =
        bound(Dialect::mysql, "UPDATE s SET a = a - :qty, b = :qty WHERE sku = :sku");
    EXPECT_EQ(mysql.text, "UPDATE s SET a = a - 25, b = ? WHERE sku = ?");
    ASSERT_EQ(mysql.parameters.size(), 2U);
}

TEST(SqlTemplate, strings_quoted_names_comments_and_casts_hold_no_places) {
    EXPECT_EQ(
        bound(Dialect::postgres,
              "UPDATE s SET a = ':sku', \":sku\" = $q$:sku$q$, b = E'\\':sku', c = :qty::int"
              " /* :sku /* :sku */ :sku */ -- :sku\n WHERE d = ARRAY[1,2][1:2];")
            .text,
        "UPDATE s SET a = ':sku', \":sku\" = $q$:sku$q$, b = E'\\':sku', c = $1::int     WHERE "
        "d = ARRAY[1,2][1:2]");
    EXPECT_EQ(bound(Dialect::mysql,
                    "UPDATE s SET a = ':sku', `:sku` = \":sku\", b = '\\':sku', c = :sku # :sku\n"
                    " /* :sku */ -- :sku")
                  .text,
              "UPDATE s SET a = ':sku', `:sku` = \":sku\", b = '\\':sku', c = ?");
    // Not a comment there, and an assignment.
    EXPECT_EQ(bound(Dialect::mysql, "SELECT 1--:qty, @a := :sku").text, "SELECT 1--25, @a := ?");
}

TEST(SqlTemplate, what_cannot_be_is_refused_with_the_statement_and_the_parameter) {
    EXPECT_EQ(refusal(Dialect::postgres, "UPDATE s SET a = :wrong"),
              "statement 1 uses :wrong, which is not among its params: add it there");
    for (const Dialect dialect : {Dialect::postgres, Dialect::mysql}) {
        EXPECT_NE(refusal(dialect, "UPDATE s SET a = 1; UPDATE s SET a = 2").find("several"),
                  std::string::npos);
        EXPECT_NE(refusal(dialect, "COMMIT").find("transaction"), std::string::npos);
        EXPECT_NE(refusal(dialect, " -- nothing").find("no words"), std::string::npos);
    }
    EXPECT_NE(refusal(Dialect::mysql, "DROP TABLE s").find("DROP"), std::string::npos);
    EXPECT_NE(refusal(Dialect::mysql, "UPDATE s SET a = ?").find(":name"), std::string::npos);
    EXPECT_NE(refusal(Dialect::postgres, "UPDATE s SET a = $1").find(":name"), std::string::npos);
}

TEST(SqlTemplate, values_go_as_each_database_wants_them) {
    EXPECT_TRUE(std::holds_alternative<std::monostate>(parameter_of(Dialect::mysql, {})));
    EXPECT_EQ(text_of(parameter_of(Dialect::postgres, {.text = "true", .boolean = true})), "true");
    EXPECT_EQ(
        std::get<std::int64_t>(parameter_of(Dialect::mysql, {.text = "true", .boolean = true})), 1);
    EXPECT_EQ(text_of(parameter_of(Dialect::mysql, {.text = "1e2"})), "1e2");  // a string's
    EXPECT_EQ(bound(Dialect::mysql, "SELECT a FROM s LIMIT :qty").text, "SELECT a FROM s LIMIT 25");
    EXPECT_EQ(bound(Dialect::mysql, "SELECT :qty -- not computed").text, "SELECT ?");
}

TEST(SqlTemplate, numbers_are_written_without_an_exponent) {
    for (const auto& [json, plain] : std::vector<std::pair<const char*, const char*>>{
             {"0", "0"},
             {"-7", "-7"},
             {"3.0", "3"},
             {"1.50", "1.50"},
             {"1E+3", "1000"},
             {"1.25e1", "12.5"},
             {"12e-3", "0.012"},
             {"-2.5E-1", "-0.25"},
             {"100e-2", "1"},
             {"0.0001e2", "0.01"},
             {"90071992547409931", "90071992547409931"},
             {"1e101", ""},
             {"", ""},
             {"-", ""},
             {"1.", ""},
             {"1e", ""},
             {"1e+-2", ""},
             {"1;DROP", ""},
             {".5", ""}})
        EXPECT_EQ(plain_number(json), plain) << json;
}

TEST(SqlTemplate, names_are_quoted_exactly_or_refused) {
    EXPECT_EQ(*quoted_name(Dialect::postgres, "shop.Orders", true, "table"), "\"shop\".\"Orders\"");
    EXPECT_EQ(*quoted_name(Dialect::mysql, "orders", true, "table"), "`orders`");
    for (const char* wrong : {"", "a b", "a`b", "a\"b", "1a", "a.b.c", ".a", "a.", "a;b"})
        EXPECT_FALSE(quoted_name(Dialect::mysql, wrong, true, "table")) << wrong;
    EXPECT_FALSE(quoted_name(Dialect::mysql, "a.b", false, "column"));
}

TEST(DbWorkers, a_lane_stays_in_one_part_and_in_order) {
    std::vector<Message> messages(10);
    std::vector<Message*> pointers;
    for (std::size_t i = 0; i < messages.size(); ++i) {
        messages[i].lane = i % 2 == 0 ? 7 : 0;
        pointers.push_back(&messages[i]);
    }
    const auto parts = split_by_lanes(pointers, 3);
    std::size_t count = 0, holds_lane = 0;
    for (const auto& part : parts) {
        count += part.size();
        std::vector<Message*> of_lane;
        for (Message* one : part)
            if (one->lane == 7) of_lane.push_back(one);
        holds_lane += of_lane.empty() ? 0 : 1;
        EXPECT_TRUE(std::is_sorted(of_lane.begin(), of_lane.end()));
        if (of_lane.empty()) EXPECT_LE(part.size(), 3U);
    }
    EXPECT_EQ(count, 10U);
    EXPECT_EQ(holds_lane, 1U);
    EXPECT_EQ(split_by_lanes(pointers, 10).size(), 1U);
}

}  // namespace
}  // namespace semel::consumer
