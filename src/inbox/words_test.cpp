#include "inbox/words.hpp"

#include <gtest/gtest.h>

namespace semel::inbox {
namespace {

using sql::Dialect;

TEST(Words, what_ends_or_nests_the_transaction_is_told_from_what_does_not) {
    for (const Dialect dialect : {Dialect::postgres, Dialect::mysql}) {
        for (const char* text : {"COMMIT", "  commit work", "/* done */ COMMIT",
                                 "-- done\nRollback", "ROLLBACK AND CHAIN", "begin",
                                 "START TRANSACTION", "END", "ABORT", "PREPARE TRANSACTION 'x'",
                                 "XA END 'x'", "SAVEPOINT semel", "ROLLBACK TO SAVEPOINT Semel",
                                 "RELEASE SAVEPOINT \"semel\"", "UPDATE t SET a = 1; COMMIT", "",
                                 "/* nothing */", "UPDATE t SET a = 'x'; /* ; */ DELETE FROM t"})
            EXPECT_TRUE(controls_transaction(text, dialect)) << text;
        for (const char* text :
             {"UPDATE stock SET qty = qty - 1", "insert into t values ('; COMMIT')",
              "SAVEPOINT mine", "ROLLBACK TO SAVEPOINT mine", "RELEASE mine", "DELETE FROM t;",
              "DELETE FROM t; -- done\n", "SELECT f()", "WITH x AS (SELECT 1) UPDATE t SET a = 1",
              "UPDATE t SET note = \"a;b\" WHERE n = 'it''s; so'"})
            EXPECT_FALSE(controls_transaction(text, dialect)) << text;
    }
}

TEST(Words, on_mysql_statements_that_commit_silently_count_too) {
    for (const char* text : {"CREATE TABLE t (a INT)", "truncate t", "SET autocommit = 1",
                             "SET SESSION autocommit = 0", "LOCK TABLES t WRITE"})
        EXPECT_TRUE(controls_transaction(text, Dialect::mysql)) << text;
    EXPECT_FALSE(controls_transaction("CREATE TEMPORARY TABLE t (a INT)", Dialect::mysql));
    EXPECT_FALSE(controls_transaction("SET @x = 1", Dialect::mysql));
    EXPECT_FALSE(controls_transaction("CREATE TABLE t (a INT)", Dialect::postgres))
        << "its DDL is part of the transaction";
}

TEST(Words, the_first_word_is_found_behind_blanks_and_comments) {
    EXPECT_EQ(first_word(" /* a */ -- b\n update t"), "UPDATE");
    EXPECT_EQ(first_word(""), "a statement without words");
}

}  // namespace
}  // namespace semel::inbox
