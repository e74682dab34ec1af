// The store on a database in memory that does what real ones do at the worst moment.
#include <algorithm>
#include <atomic>
#include <random>
#include <set>
#include <thread>

#include "sql/sql_store_test.hpp"
#include "sql/worker.hpp"

namespace semel::sql {
namespace {

// ---------------------------------------------------------------- one item at fault

TEST_F(SqlStore, one_locked_row_among_64_lets_the_others_pass_and_is_answered_once_it_is_free) {
    open();
    database.lock(key(17));
    Answers answers = claim_together(64);
    for (std::size_t i = 0; i < 64; ++i) {
        if (i != 17) {
            EXPECT_EQ(as<Granted>(answers[i].get().front()).kind, Granted::Kind::fresh);
        }
    }
    EXPECT_NE(answers[17].wait_for(0s), std::future_status::ready);
    milliseconds wanted = quick_lock_wait;
    for (const auto& asked : database.log()) {
        if (asked.call != Call::insert || asked.keys.size() != 1) continue;
        if (asked.keys.front() != key(17)) {
            EXPECT_EQ(asked.ask.lock_wait, quick_lock_wait);
        } else {
            EXPECT_EQ(asked.ask.lock_wait, wanted) << "each try waits twice as long";
            wanted = std::min(2 * wanted, long_lock_wait);
        }
    }
    database.unlock(key(17));
    EXPECT_EQ(as<Granted>(answers[17].get().front()).kind, Granted::Kind::fresh);
}

TEST_F(SqlStore, a_row_that_stays_locked_is_given_up_after_patience_and_nothing_was_done) {
    options.patience = 150ms;
    open();
    database.lock(k);
    const auto began = std::chrono::steady_clock::now();
    const Asked result = ask(k, claim(1));
    EXPECT_GE(std::chrono::steady_clock::now() - began, 150ms);
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, base::ErrorCode::store_unavailable);
    EXPECT_EQ(result.error().applied, base::Applied::no);
    EXPECT_EQ(result.error().retry_after, 1s);
    EXPECT_TRUE(result.error().detail.starts_with("sql: ")) << result.error().detail;
    EXPECT_NE(result.error().detail.find("locked by another transaction"), std::string::npos);
    database.unlock(k);
    EXPECT_EQ(as<Found>(ask(k, Get{})).record, nullptr);
}

TEST_F(SqlStore, a_locked_row_keeps_those_that_are_answered_with_it_waiting_for_a_shorter_time) {
    options.patience = 60s;
    open();
    database.lock(key(2));
    std::vector<Item> items;
    for (std::size_t i = 0; i < 5; ++i) items.push_back({key(i), claim(1)});
    items.push_back({key(2), claim(2)});
    const BatchResults results = submit(std::move(items)).get();
    for (const std::size_t i : {0U, 1U, 3U, 4U}) as<Granted>(results[i]);
    for (const std::size_t i : {2U, 5U}) {
        ASSERT_FALSE(results[i]);
        EXPECT_EQ(results[i].error().applied, base::Applied::no);
    }
}

TEST_F(SqlStore, locked_rows_of_every_kind_of_write_pass_the_others_by) {
    open();
    const Granted mine = grant(key(0));
    const Granted done = grant(key(1));
    const Granted renewed = grant(key(2));
    database.lock(key(0));
    Answers answers = together({{key(0), completion(mine.token, 1)},
                                {key(1), completion(done.token, 1)},
                                {key(0), Renew{mine.token, nonce(1), 20s}},
                                {key(2), Renew{renewed.token, nonce(1), 20s}}});
    as<Applied>(answers[1].get().front());
    as<Applied>(answers[3].get().front());
    EXPECT_NE(answers[0].wait_for(0s), std::future_status::ready);
    EXPECT_NE(answers[2].wait_for(0s), std::future_status::ready);
    database.unlock(key(0));
    as<Applied>(answers[0].get().front());
    EXPECT_TRUE(answers[2].get().front());
}

TEST_F(SqlStore, one_refused_item_among_64_fails_alone_and_says_why) {
    open();
    database.refuse(key(5));
    Answers answers = claim_together(64);
    for (std::size_t i = 0; i < 64; ++i) {
        const Asked result = std::move(answers[i].get().front());
        if (i == 5) {
            ASSERT_FALSE(result);
            EXPECT_EQ(result.error().code, base::ErrorCode::invalid_argument);
            EXPECT_EQ(result.error().applied, base::Applied::no);
            EXPECT_EQ(result.error().detail, "sql: too large");
        } else {
            EXPECT_EQ(as<Granted>(result).kind, Granted::Kind::fresh);
        }
    }
}

TEST_F(SqlStore, a_deadlock_is_asked_again_item_by_item_and_a_lone_one_by_itself) {
    open();
    once(Call::insert, contended());
    for (auto& answer : claim_together(3))
        EXPECT_EQ(as<Granted>(answer.get().front()).kind, Granted::Kind::fresh);
    EXPECT_EQ(sizes(Call::insert), (std::vector<std::size_t>{3, 1, 1, 1}));
    once(Call::insert, contended());
    EXPECT_EQ(grant(k).kind, Granted::Kind::fresh);
    once(Call::read, contended());
    EXPECT_TRUE(as<Found>(ask(k, Get{})).record);
    once(Call::other, contended());
    EXPECT_EQ(as<Value>(ask({}, ClaimValue{"a", "b"})).value, "b");
}

TEST_F(SqlStore, a_damaged_row_fails_its_own_item_only) {
    open();
    for (std::size_t i = 0; i < 3; ++i) grant(key(i));
    auto row = database.row(key(1));
    row->head.resize(row->head.size() / 2);
    database.put(key(1), row);
    Answers answers =
        together({{key(0), Get{}}, {key(1), Get{}}, {key(2), Get{}}, {key(1), claim(2)}});
    EXPECT_TRUE(as<Found>(answers[0].get().front()).record);
    EXPECT_TRUE(as<Found>(answers[2].get().front()).record);
    for (const std::size_t i : {1U, 3U}) {
        const Asked damaged = std::move(answers[i].get().front());
        ASSERT_FALSE(damaged);
        EXPECT_EQ(damaged.error().code, base::ErrorCode::store_corrupt);
        EXPECT_NE(damaged.error().detail.find(base::base64url(key(1).view())), std::string::npos);
    }
    EXPECT_EQ(store->scan({}, {}, 10).error().code, base::ErrorCode::store_corrupt);
}

// ---------------------------------------------------------------- lost answers

TEST_F(SqlStore, a_grant_whose_answer_was_lost_is_found_by_its_nonce) {
    open();
    once(Call::insert, lost(base::Applied::unknown), true);
    const Granted found = grant(k);
    EXPECT_EQ(found.kind, Granted::Kind::repeated);
    EXPECT_EQ(found.attempt, 1U);
    EXPECT_EQ(database.calls(Call::insert), 1U);
    as<Applied>(ask(k, completion(found.token, 1)));
    // The same for a takeover, which is written by another statement.
    const StoredKey failed = key("failed");
    const Granted first = grant(failed);
    as<Applied>(ask(failed, Release{first.token, nonce(1)}));
    once(Call::replace, lost(base::Applied::unknown), true);
    const Granted retry = grant(failed, 2);
    EXPECT_EQ(retry.kind, Granted::Kind::repeated);
    EXPECT_EQ(retry.attempt, 2U);
}

TEST_F(SqlStore, a_grant_that_was_not_made_is_an_unknown_outcome_and_nobodys) {
    open();
    once(Call::insert, lost(base::Applied::unknown), false);
    Asked result = ask(k, claim(1));
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().applied, base::Applied::unknown);
    EXPECT_EQ(result.error().code, base::ErrorCode::store_unavailable);
    EXPECT_EQ(database.calls(Call::insert), 1U)
        << "it must not be granted behind the caller's back";
    EXPECT_EQ(as<Found>(ask(k, Get{})).record, nullptr);
    // Also if what is read back cannot be read: it stays unknown.
    const std::size_t inserts = database.calls(Call::insert);
    database.set_script([&](const SqlDatabase::Asked& asked) -> std::optional<Fault> {
        if (asked.call == Call::insert && asked.number == inserts + 1)
            return Fault{lost(base::Applied::unknown), true};
        if (asked.call == Call::read) return Fault{lost(base::Applied::unknown)};
        return std::nullopt;
    });
    result = ask(k, claim(1));
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().applied, base::Applied::unknown);
    database.set_script({});
    EXPECT_EQ(grant(k).kind, Granted::Kind::repeated);
}

TEST_F(SqlStore, what_surely_was_not_sent_is_asked_again) {
    open();
    once(Call::insert, lost(base::Applied::no));
    const Granted g = grant(k);
    EXPECT_EQ(g.kind, Granted::Kind::fresh);
    once(Call::complete, lost(base::Applied::no));
    as<Applied>(ask(k, completion(g.token, 1)));
    once(Call::read, lost(base::Applied::no));
    EXPECT_TRUE(as<Found>(ask(k, Get{})).record);
    once(Call::other, lost(base::Applied::no));
    as<ChunkStored>(ask(k, PutChunk{g.token, 0, "x"}));
}

TEST_F(SqlStore, any_other_lost_answer_is_told_as_unknown_and_asking_again_is_answered) {
    open();
    const Granted g = grant(k);
    const auto expect_unknown = [&](Call call, StoreOperation operation) {
        once(call, lost(base::Applied::unknown), true);
        const Asked result = ask(k, operation);
        ASSERT_FALSE(result);
        EXPECT_EQ(result.error().applied, base::Applied::unknown);
        EXPECT_EQ(result.error().retry_after, 1s);
        as<Applied>(ask(k, operation));
    };
    expect_unknown(Call::replace, Renew{g.token, nonce(1), 20s});
    expect_unknown(Call::complete, completion(g.token, 1, "kept"));
    EXPECT_EQ(*as<Found>(ask(k, Get{})).record->answer->body, "kept");
    once(Call::other, lost(base::Applied::unknown), true);
    EXPECT_EQ(ask(k, DeleteConversation{}).error().applied, base::Applied::unknown);
}

TEST_F(SqlStore, parking_whose_answer_was_lost_is_told_as_unknown_and_a_locked_list_waited_for) {
    open();
    once(Call::other, lost(base::Applied::unknown), true);
    EXPECT_EQ(ask(k, OpenParking{nonce(1)}).error().applied, base::Applied::unknown);
    once(Call::other, contended());
    as<ParkingOpened>(ask(k, OpenParking{nonce(1)}));
    for (const bool done : {false, true}) {
        const std::uint64_t place = done ? 1 : 2;
        once(Call::park, lost(base::Applied::unknown), done);
        EXPECT_EQ(ask(k, Park{nonce(1), place, "x"}).error().applied, base::Applied::unknown);
    }
    const std::size_t statements = database.calls(Call::park);
    EXPECT_EQ(statements, 2U) << "a copy may put back what was taken out meanwhile";
    once(Call::other, lost(base::Applied::unknown));
    EXPECT_EQ(as<ParkedFound>(ask(k, GetParked{})).messages.size(), 1U) << "a read is asked again";
    once(Call::unpark, lost(base::Applied::unknown));
    EXPECT_EQ(ask(k, Unpark{1}).error().applied, base::Applied::unknown);
    as<Unparked>(ask(k, Unpark{1}));
    as<ParkingOpened>(ask(key(1), OpenParking{nonce(1)}));
    // One list at fault among others in a statement.
    database.lock(k);
    Answers answers = together({{key(1), Park{nonce(1), 1, "x"}},
                                {k, Park{nonce(1), 2, "x"}},
                                {key(1), Park{nonce(1), 3, "x"}}});
    as<Parked>(answers[0].get().front());
    as<Parked>(answers[2].get().front());
    EXPECT_NE(answers[1].wait_for(0s), std::future_status::ready);
    database.unlock(k);
    as<Parked>(answers[1].get().front());
    database.set_full(true);
    const Asked full = ask(k, Park{nonce(1), 4, "x"});
    ASSERT_FALSE(full);
    EXPECT_EQ(full.error().code, base::ErrorCode::store_full);
}

TEST_F(SqlStore, a_read_whose_answer_was_lost_is_asked_again_once_and_never_unknown) {
    open();
    grant(k);
    once(Call::read, lost(base::Applied::unknown));
    EXPECT_TRUE(as<Found>(ask(k, Get{})).record);
    once(Call::other, lost(base::Applied::unknown));
    EXPECT_TRUE(as<TurnsFound>(ask(k, GetTurns{})).turns.empty());
    const std::size_t reads = database.calls(Call::read);
    database.set_script([](const SqlDatabase::Asked& asked) -> std::optional<Fault> {
        if (asked.call != Call::read) return std::nullopt;
        return Fault{lost(base::Applied::unknown)};
    });
    // Also of an operation that would write after it.
    for (const StoreOperation& operation :
         {StoreOperation{Get{}}, StoreOperation{Start{{1}, nonce(1)}}}) {
        const Asked result = ask(k, operation);
        ASSERT_FALSE(result);
        EXPECT_EQ(result.error().applied, base::Applied::no);
    }
    EXPECT_EQ(database.calls(Call::read), reads + 4);
}

TEST_F(SqlStore, one_item_that_breaks_connections_does_not_break_the_others_for_long) {
    open();
    database.set_script([&](const SqlDatabase::Asked& asked) -> std::optional<Fault> {
        const auto& keys = asked.keys;
        if (asked.call != Call::insert || std::find(keys.begin(), keys.end(), key(3)) == keys.end())
            return std::nullopt;
        return Fault{lost(base::Applied::no)};
    });
    Answers answers = claim_together(16);
    for (std::size_t i = 0; i < 16; ++i) {
        if (i != 3) {
            EXPECT_EQ(as<Granted>(answers[i].get().front()).kind, Granted::Kind::fresh);
        }
    }
    database.set_script({});
    EXPECT_EQ(as<Granted>(answers[3].get().front()).kind, Granted::Kind::fresh);
}

// ---------------------------------------------------------------- a full disk, a standby

TEST_F(SqlStore, with_a_full_disk_what_needs_no_write_is_answered) {
    open();
    const Granted done = grant(key("done"));
    as<Applied>(ask(key("done"), completion(done.token, 1, "kept")));
    const Granted running = grant(key("running"));
    const Granted failed = grant(key("failed"));
    as<Applied>(ask(key("failed"), Release{failed.token, nonce(1)}));
    store->stop();
    open();  // knows of nothing
    const base::SteadyTime before = std::chrono::steady_clock::now();
    database.set_full(true);
    std::vector<Item> items;
    items.push_back({key("done"), claim(2)});
    items.push_back({key("running"), claim(2)});
    items.push_back({key("new"), claim(2)});
    items.push_back({key("failed"), claim(2)});
    items.push_back({key("running"), completion(running.token, 1)});
    items.push_back({key("running"), Get{}});
    const BatchResults results = submit(std::move(items)).get();
    EXPECT_EQ(*as<Replay>(results[0]).record->answer->body, "kept");
    EXPECT_EQ(as<InFlight>(results[1]).token, running.token);
    for (const std::size_t i : {2U, 3U, 4U}) {
        ASSERT_FALSE(results[i]) << i;
        EXPECT_EQ(results[i].error().code, base::ErrorCode::store_full);
        EXPECT_EQ(results[i].error().applied, base::Applied::no);
        EXPECT_EQ(results[i].error().retry_after, 1s);
    }
    EXPECT_EQ(as<Found>(results[5]).record->status, Status::processing);
    EXPECT_GE(store->answering_since(), before) << "owners could not renew";
    database.set_full(false);
    as<Applied>(ask(key("running"), completion(running.token, 1)));
}

TEST_F(SqlStore, a_server_that_became_a_standby_is_left_and_asked_again_when_there_is_a_primary) {
    open();
    grant(k);
    database.set_standby(true);
    auto waiting = begin(key("new"), claim(1));
    database.await_calls(Call::connect, 4);
    EXPECT_NE(waiting.wait_for(0s), std::future_status::ready);
    EXPECT_NE(store->health().error().detail.find("standby"), std::string::npos);
    database.set_standby(false);
    EXPECT_EQ(as<Granted>(waiting.get().front()).kind, Granted::Kind::fresh);
    EXPECT_TRUE(store->health());
}

TEST_F(SqlStore, while_the_server_is_down_items_wait_and_after_patience_are_told_why) {
    options.connections = 3;
    options.patience = 200ms;
    open();
    const Granted g = grant(k);
    EXPECT_TRUE(store->health());
    database.set_down(true);
    Answers answers;
    for (std::size_t i = 0; i < 20; ++i) answers.push_back(begin(key(i), claim(1)));
    answers.push_back(begin(k, completion(g.token, 1)));
    for (auto& answer : answers) {
        const Asked result = std::move(answer.get().front());
        ASSERT_FALSE(result);
        EXPECT_EQ(result.error().code, base::ErrorCode::store_unavailable);
        EXPECT_NE(result.error().applied, base::Applied::yes);
        EXPECT_NE(result.error().detail.find("connection"), std::string::npos);
    }
    const Asked late = ask(k, Get{});
    ASSERT_FALSE(late);
    EXPECT_EQ(late.error().applied, base::Applied::no);
    EXPECT_NE(late.error().detail.find("connection refused"), std::string::npos)
        << late.error().detail;
    EXPECT_NE(store->health().error().detail.find("connection refused"), std::string::npos);
    EXPECT_FALSE(store->scan({}, {}, 10));
    const base::SteadyTime back = std::chrono::steady_clock::now();
    EXPECT_GE(store->answering_since(), back);
    database.set_down(false);
    eventually([&] { return bool(store->health()); });
    as<Applied>(ask(k, completion(g.token, 1)));
    EXPECT_GE(store->answering_since(), back);
    EXPECT_EQ(store->scan({}, {}, 10)->records.size(), 1U);
}

TEST_F(SqlStore, an_idle_connection_that_broke_is_noticed_and_made_anew_before_it_is_needed) {
    open();
    grant(k);
    const std::size_t connects = database.calls(Call::connect);
    database.set_down(true);
    database.set_down(false);
    database.await_calls(Call::connect, connects + 1);
    EXPECT_TRUE(as<Found>(ask(k, Get{})).record);
}

TEST_F(SqlStore, a_store_that_begins_without_a_connection_makes_one) {
    database.set_down(true);
    store = make_sql_store(options, database.connect(), nullptr);
    EXPECT_FALSE(store->health());
    auto waiting = begin(k, claim(1));
    database.await_calls(Call::connect, 3);
    database.set_down(false);
    EXPECT_EQ(as<Granted>(waiting.get().front()).kind, Granted::Kind::fresh);
}

TEST_F(SqlStore, its_clock_is_the_databases) {
    database.set_clock_ahead(1h);
    open();
    const auto expected = [&](std::chrono::microseconds ahead) {
        return StoreTime{base::system_clocks().wall_us()} + ahead;
    };
    EXPECT_LT(std::chrono::abs(store->now() - expected(1h)), 100ms);
    const Asked result = ask(k, claim(1));
    EXPECT_EQ(as<Granted>(result).created, result->at);
    EXPECT_LT(std::chrono::abs(result->at - expected(1h)), 10s);
}

// ---------------------------------------------------------------- all at once

TEST_F(SqlStore, under_every_fault_at_once_no_key_is_completed_by_two_owners) {
    options.connections = 4;
    options.batch_max = 8;
    open();
    constexpr std::size_t keys = 12;
    constexpr int rounds = 60;
    std::mutex mutex;
    std::mt19937_64 random(20261);
    const auto below = [&](std::uint64_t n) {
        const std::lock_guard lock(mutex);
        return random() % n;
    };
    database.set_script([&](const SqlDatabase::Asked& asked) -> std::optional<Fault> {
        if (asked.call == Call::connect || asked.call == Call::time) return std::nullopt;
        switch (below(12)) {
            case 0:
                return Fault{lost(base::Applied::unknown), true};
            case 1:
                return Fault{lost(base::Applied::unknown), false};
            case 2:
                return Fault{lost(base::Applied::no), false};
            case 3:
            case 4:
                return Fault{contended(), false};
            default:
                return std::nullopt;
        }
    });
    std::vector<std::set<std::uint8_t>> completed_by(keys);
    std::vector<std::thread> threads;
    for (std::uint8_t owner = 1; owner <= 6; ++owner) {
        threads.emplace_back([&, owner] {
            for (int round = 0; round < rounds; ++round) {
                const std::size_t of = below(keys);
                Acquire op = claim(owner);
                op.lease = 0ms;  // anybody may take over at once
                const Asked result = ask(key(of), op);
                if (!result) continue;
                const Granted* granted = std::get_if<Granted>(&result->outcome);
                if (granted == nullptr) continue;
                Complete done = completion(granted->token, owner, std::to_string(owner));
                done.append = Append{.conversation = key("talk"), .request_id = std::to_string(of)};
                const Asked finished = ask(key(of), done);
                if (finished && std::holds_alternative<Applied>(finished->outcome)) {
                    const std::lock_guard lock(mutex);
                    completed_by[of].insert(owner);
                }
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    database.set_script({});
    std::size_t completed = 0;
    for (std::size_t i = 0; i < keys; ++i) {
        EXPECT_LE(completed_by[i].size(), 1U);
        const RecordPtr record = as<Found>(ask(key(i), Get{})).record;
        if (!record || record->status != Status::completed) {
            EXPECT_TRUE(completed_by[i].empty()) << "an acknowledged answer is gone";
            continue;
        }
        ++completed;
        const auto owner = static_cast<std::uint8_t>(record->nonce.bytes[0]);
        EXPECT_EQ(*record->answer->body, std::to_string(owner));
        if (!completed_by[i].empty()) EXPECT_EQ(*completed_by[i].begin(), owner);
    }
    EXPECT_GT(completed, keys / 2);
    EXPECT_EQ(database.turns(), completed) << "one turn for each completed intent";
}

}  // namespace
}  // namespace semel::sql
