// The store on a database in memory: batches, races, listings, its end.
#include "sql/sql_store_test.hpp"

#include <algorithm>
#include <atomic>
#include <thread>

#include "core/answers_singly.hpp"
#include "sql/queue.hpp"

namespace semel::sql {
namespace {

// ---------------------------------------------------------------- batches

TEST_F(SqlStore, what_comes_while_all_connections_are_busy_is_one_statement) {
    open();
    Answers answers = claim_together(64);
    for (auto& answer : answers)
        EXPECT_EQ(as<Granted>(answer.get().front()).kind, Granted::Kind::fresh);
    EXPECT_EQ(sizes(Call::insert), std::vector<std::size_t>{64});
}

TEST_F(SqlStore, a_batch_is_no_larger_than_batch_max_and_the_oldest_kind_goes_first) {
    options.batch_max = 10;
    open();
    std::vector<Item> items;
    const Granted g = grant(k);
    items.push_back({k, completion(g.token, 1)});
    for (std::size_t i = 0; i < 25; ++i) items.push_back({key(i), claim(1)});
    for (auto& answer : together(std::move(items))) EXPECT_TRUE(answer.get().front());
    EXPECT_EQ(sizes(Call::insert), (std::vector<std::size_t>{1, 10, 10, 5}));
    const auto log = database.log();
    const auto first = [&](Call call, std::size_t keys) {
        return std::find_if(log.begin(), log.end(), [&](const auto& asked) {
            return asked.call == call && asked.keys.size() == keys;
        });
    };
    EXPECT_LT(first(Call::complete, 1), first(Call::insert, 10));
}

TEST_F(SqlStore, messages_of_one_list_share_a_statement_and_the_order_on_a_place_is_kept) {
    open();
    as<ParkingOpened>(ask(k, OpenParking{nonce(1)}));
    std::vector<Item> items;
    for (std::uint64_t place = 0; place < 60; ++place)
        items.push_back({k, Park{nonce(1), place, "first"}});
    for (const auto& result : submit(std::move(items)).get()) as<Parked>(result);
    EXPECT_EQ(database.calls(Call::park), 1U);

    items.clear();
    for (std::uint64_t place = 5; place < 60; ++place) items.push_back({k, Unpark{place}});
    items.push_back({k, Park{nonce(1), 9, "again"}});  // behind its Unpark
    items.push_back({k, Park{nonce(2), 10, "a zombie's"}});
    items.push_back({k, GetParked{}});
    items.push_back({k, Unpark{1}});
    items.push_back({k, OpenParking{nonce(2)}});
    items.push_back({k, Park{nonce(2), 10, "the next owner's"}});
    items.push_back({k, Park{nonce(1), 11, "a zombie's"}});
    const BatchResults results = submit(std::move(items)).get();
    EXPECT_EQ(database.calls(Call::unpark), 2U);
    as<Parked>(results[55]);
    as<ParkingLost>(results[56]);
    const auto found = as<ParkedFound>(results[57]).messages;
    ASSERT_EQ(found.size(), 6U);
    EXPECT_EQ(found[5].bytes, "again");
    as<Unparked>(results[58]);
    as<ParkingOpened>(results[59]);
    as<Parked>(results[60]);
    as<ParkingLost>(results[61]);
    std::vector<std::uint64_t> places;
    for (const auto& one : as<ParkedFound>(ask(k, GetParked{})).messages)
        places.push_back(one.place);
    EXPECT_EQ(places, (std::vector<std::uint64_t>{0, 2, 3, 4, 9, 10}));
}

TEST_F(SqlStore, a_statement_that_parks_takes_no_more_messages_once_it_has_a_megabyte) {
    open();
    as<ParkingOpened>(ask(k, OpenParking{nonce(1)}));
    std::vector<Item> items;
    for (std::uint64_t place = 0; place < 6; ++place)
        items.push_back({key(place), OpenParking{nonce(1)}});
    for (const auto& result : submit(std::move(items)).get()) as<ParkingOpened>(result);
    items.clear();
    for (std::uint64_t place = 0; place < 6; ++place)
        items.push_back(
            {key(place), Park{nonce(1), place, std::string(parked_bytes_max / 2, 'm')}});
    for (const auto& result : submit(std::move(items)).get()) as<Parked>(result);
    EXPECT_EQ(sizes(Call::park), (std::vector<std::size_t>{2, 2, 2}));
}

TEST_F(SqlStore,
       of_equal_ids_in_one_batch_exactly_the_first_is_granted_and_none_shares_a_statement) {
    open();
    std::vector<Item> items;
    for (std::uint8_t i = 0; i < 64; ++i)
        items.push_back({key(i == 0 || i == 31 || i == 63 ? 0U : i), claim(i)});
    const BatchResults results = submit(std::move(items)).get();
    for (std::size_t i = 0; i < 64; ++i) {
        if (i == 31 || i == 63) {
            EXPECT_EQ(as<InFlight>(results[i]).owner.id, "owner-0");
        } else {
            EXPECT_EQ(as<Granted>(results[i]).kind, Granted::Kind::fresh);
        }
    }
    // The same from callers that know nothing of each other.
    std::vector<Item> apart;
    for (std::uint8_t i = 1; i <= 8; ++i) apart.push_back({key("apart"), claim(i)});
    int granted = 0;
    for (auto& answer : together(std::move(apart)))
        granted += std::holds_alternative<Granted>(answer.get().front()->outcome) ? 1 : 0;
    EXPECT_EQ(granted, 1);
}

TEST_F(SqlStore, submitted_singly_an_item_on_a_locked_row_delays_the_answer_to_no_other) {
    open();
    grant(k);
    database.lock(k);
    std::vector<Item> items;
    for (std::size_t i = 0; i < 63; ++i) items.push_back({key(i), claim(1)});
    items.insert(items.begin() + 5, {k, Release{{}, nonce(1)}});
    std::array<std::promise<base::Result<Decided>>, 64> told;
    dynamic_cast<core::AnswersSingly&>(*store).submit_singly(
        std::move(items), [&](std::size_t index, base::Result<Decided> result) {
            told[index].set_value(std::move(result));
        });
    for (std::size_t i = 0; i < 64; ++i) {
        if (i != 5) EXPECT_TRUE(told[i].get_future().get()) << i;
    }
    // All the others have theirs, and only now can this one get its own.
    database.unlock(k);
    EXPECT_TRUE(told[5].get_future().get());
}

TEST_F(SqlStore, turns_of_one_conversation_share_no_statement_and_keep_the_order_of_their_batch) {
    open();
    std::vector<Item> items;
    const StoredKey talk = key("talk");
    for (std::size_t i = 0; i < 5; ++i) {
        Complete done = completion(grant(key(i)).token, 1);
        done.append = Append{.conversation = talk, .request_id = std::to_string(i)};
        items.push_back({key(i), std::move(done)});
    }
    items.push_back({talk, GetTurns{}});
    const BatchResults results = submit(std::move(items)).get();
    const std::vector<Turn> turns = as<TurnsFound>(results.back()).turns;
    ASSERT_EQ(turns.size(), 5U);
    for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(turns[i].request_id, std::to_string(i));
    EXPECT_EQ(sizes(Call::complete), std::vector<std::size_t>(5, 1));
}

TEST_F(SqlStore, a_replay_of_what_this_process_saw_completed_is_one_read) {
    open();
    const Granted g = grant(k);
    as<Applied>(ask(k, completion(g.token, 1, "kept")));
    const std::size_t inserts = database.calls(Call::insert);
    const std::size_t reads = database.calls(Call::read);
    EXPECT_EQ(*as<Replay>(ask(k, claim(2))).record->answer->body, "kept");
    EXPECT_EQ(database.calls(Call::insert), inserts);
    EXPECT_EQ(database.calls(Call::read), reads + 1);
    // What it remembers may be wrong: somebody removed the record.
    database.put(k, std::nullopt);
    EXPECT_EQ(grant(k, 3).kind, Granted::Kind::fresh);
}

// ---------------------------------------------------------------- others are faster

TEST_F(SqlStore, a_decision_on_a_row_that_changed_meanwhile_is_made_again_on_the_new_one) {
    open();
    const Granted zombie = grant(k);
    // Between its read and its write another takes over.
    database.set_script([&, before = database.calls(Call::replace)](
                            const SqlDatabase::Asked& asked) -> std::optional<Fault> {
        if (asked.call != Call::replace || asked.number != before + 1) return std::nullopt;
        auto row = database.row(k);
        Record record = **record_of(*row, true);
        ++record.token.value;
        record.nonce = nonce(2);
        ++record.attempt;
        database.put(k, row_of(k, record, row->version + 1));
        return std::nullopt;
    });
    const Fenced fenced = as<Fenced>(ask(k, Renew{zombie.token, nonce(1), 20s}));
    EXPECT_EQ(fenced.record->nonce, nonce(2));
    EXPECT_EQ(fenced.record->attempt, 2U);
}

TEST_F(SqlStore, a_row_that_was_purged_before_its_takeover_is_granted_anew) {
    open();
    const Granted first = grant(k);
    as<Applied>(ask(k, Release{first.token, nonce(1)}));
    database.set_script([&, before = database.calls(Call::replace)](
                            const SqlDatabase::Asked& asked) -> std::optional<Fault> {
        if (asked.call == Call::replace && asked.number == before + 1)
            database.put(k, std::nullopt);
        return std::nullopt;
    });
    EXPECT_EQ(grant(k, 2).kind, Granted::Kind::fresh);
}

TEST_F(SqlStore, a_decision_is_not_written_long_after_the_moment_it_was_made_for) {
    std::atomic<std::int64_t> now{1'800'000'000'000'000};
    options.time = [&] { return StoreTime{now.load()}; };
    open();
    Granted g = grant(k);
    // The write is held up: what was decided for a living lease must be decided again.
    const auto held_up = [&, before = database.calls(Call::replace)](
                             const SqlDatabase::Asked& asked) -> std::optional<Fault> {
        EXPECT_EQ(asked.ask.time.has_value(), asked.call != Call::connect);
        if (asked.call != Call::replace || asked.number != before + 1) return std::nullopt;
        now += 3'000'000;
        return std::nullopt;
    };
    // The statement's time is told when it is asked; so move it before.
    database.set_script([&, before = database.calls(Call::read)](
                            const SqlDatabase::Asked& asked) -> std::optional<Fault> {
        if (asked.call == Call::read && asked.number == before + 1) now += 3'000'000;
        return held_up(asked);
    });
    const Asked renewed = ask(k, Renew{g.token, nonce(1), 20s});
    const Applied applied = as<Applied>(renewed);
    EXPECT_EQ(applied.record->lease_end, renewed->at + 20s);
    EXPECT_GE(renewed->at.us, 1'800'000'003'000'000);
    EXPECT_EQ(sizes(Call::replace).size(), 2U) << "the first came too late";
    database.set_script({});
    // An acquire's own limit holds for its takeover, too.
    now += 60'000'000;
    Acquire late = claim(2);
    late.not_after = {now.load() + 1'000'000};
    database.set_script([&, before = database.calls(Call::insert)](
                            const SqlDatabase::Asked& asked) -> std::optional<Fault> {
        if (asked.call == Call::insert && asked.number == before + 1) now += 1'500'000;
        return std::nullopt;
    });
    as<Late>(ask(k, late));
    database.set_script({});
    EXPECT_EQ(as<Found>(ask(k, Get{})).record->nonce, nonce(1));
}

TEST_F(SqlStore, an_acquire_that_comes_too_late_leaves_nothing) {
    open();
    Acquire late = claim(1);
    late.not_after = store->now() - 1s;
    as<Late>(ask(k, late));
    EXPECT_EQ(as<Found>(ask(k, Get{})).record, nullptr);
    // The empty nonce is nobody's: also the statement that completes must not take it for an
    // owner's.
    Acquire nobody = claim(0);
    const Granted g = as<Granted>(ask(k, nobody));
    as<Fenced>(ask(k, completion(g.token, 0)));
}

// ---------------------------------------------------------------- listings

TEST_F(SqlStore, scans_and_purges_run_on_a_connection_of_their_own_in_bounded_statements) {
    std::atomic<std::int64_t> now{1'800'000'000'000'000};
    options.time = [&] { return StoreTime{now.load()}; };
    open();
    for (std::size_t i = 0; i < 700; ++i) {
        const Granted g = grant(key(i));
        as<Applied>(ask(key(i), completion(g.token, 1)));
    }
    const std::size_t connects = database.calls(Call::connect);
    EXPECT_EQ(store->scan({}, {}, 1000)->records.size(), 700U);
    EXPECT_EQ(database.calls(Call::connect), connects + 1);
    EXPECT_EQ(store->scan({}, "no cursor", 10).error().code, base::ErrorCode::invalid_argument);
    // A connection that broke is made anew for a listing, and a lock is waited for.
    once(Call::list, lost(base::Applied::unknown));
    EXPECT_EQ(store->scan({}, {}, 10)->records.size(), 10U);
    once(Call::purge, contended());
    EXPECT_EQ(store->purge(1000).value(), 0U);
    now += std::chrono::microseconds{25h}.count();
    const std::size_t purges = database.calls(Call::purge);
    EXPECT_EQ(store->purge(1000).value(), 700U);
    EXPECT_EQ(database.calls(Call::purge), purges + 3);
    EXPECT_TRUE(store->scan({}, {}, 10)->records.empty());
}

// ---------------------------------------------------------------- the end

TEST_F(SqlStore, stopping_finishes_what_was_submitted_and_refuses_what_comes_later) {
    open();
    database.close_gate();
    std::vector<Item> items;
    items.push_back({k, claim(1)});
    items.push_back({k, claim(2)});  // not even queued yet
    auto in_flight = submit(std::move(items));
    database.await_calls(Call::insert, 1);
    std::thread stopper([&] { store->stop(); });
    Answers meanwhile;
    std::optional<base::Error> refused;
    eventually([&] {
        meanwhile.push_back(begin(key("later"), Get{}));
        if (meanwhile.back().wait_for(0s) != std::future_status::ready) return false;
        refused = meanwhile.back().get().front().error();
        meanwhile.pop_back();
        return true;
    });
    EXPECT_EQ(refused->code, base::ErrorCode::stopping);
    EXPECT_EQ(refused->applied, base::Applied::no);
    EXPECT_NE(in_flight.wait_for(0s), std::future_status::ready);
    database.open_gate();
    stopper.join();
    const BatchResults results = in_flight.get();
    as<Granted>(results[0]);
    as<InFlight>(results[1]);
    for (auto& each : meanwhile) EXPECT_TRUE(each.get().front());
    store->stop();
    EXPECT_FALSE(store->health());
    EXPECT_EQ(store->purge(1).error().code, base::ErrorCode::stopping);
}

TEST_F(SqlStore, stopping_without_a_server_ends_when_patience_does) {
    options.patience = 100ms;
    open();
    database.set_down(true);
    auto waiting = begin(k, claim(1));
    store->stop();
    EXPECT_FALSE(waiting.get().front());
}

}  // namespace
}  // namespace semel::sql
