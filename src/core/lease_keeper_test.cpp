#include "core/lease_keeper.hpp"

#include <gtest/gtest.h>

namespace semel::core {
namespace {

using namespace std::chrono_literals;
using base::SteadyTime;

constexpr milliseconds lease = 6s;
const SteadyTime start{1000s};

LeaseKeeper keeper() { return {start, lease, FencingToken{7}, Nonce{}}; }

RecordPtr record_of(FencingToken token, Status status, bool final = false) {
    auto record = std::make_shared<Record>();
    record->token = token;
    record->status = status;
    record->final = final;
    return record;
}

TEST(LeaseKeeper, renews_between_a_sixth_and_a_third_of_the_lease_and_once_at_a_time) {
    LeaseKeeper k = keeper();
    EXPECT_EQ(k.step(start + 999ms, LeaseTick{}), LeaseAction::none);
    EXPECT_EQ(k.step(start + 1s, LeaseTick{}), LeaseAction::renew);
    EXPECT_EQ(k.step(start + 2s, LeaseTick{}), LeaseAction::none) << "one is on its way";
    EXPECT_EQ(k.step(start + 2s, LeaseUnanswered{}), LeaseAction::none);
    EXPECT_EQ(k.step(start + 2s, LeaseTick{}), LeaseAction::renew)
        << "asked again at the next tick";
}

TEST(LeaseKeeper, counts_the_lease_from_before_the_renewal_was_sent_not_from_its_answer) {
    LeaseKeeper k = keeper();
    ASSERT_EQ(k.step(start + 1s, LeaseTick{}), LeaseAction::renew);
    k.step(start + 4s, LeaseRenewed{});
    EXPECT_EQ(k.safe_until(), start + 1s + lease);
    EXPECT_EQ(k.step(start + 4s, LeaseTick{}), LeaseAction::renew) << "three seconds old already";
}

TEST(LeaseKeeper, after_a_stall_past_its_lease_it_asks_at_once_instead_of_giving_up) {
    LeaseKeeper k = keeper();
    EXPECT_EQ(k.step(start + 60s, LeaseTick{}), LeaseAction::renew);
    EXPECT_FALSE(k.overtaken());
}

TEST(LeaseKeeper, another_token_or_nonce_is_an_overtaking_told_once) {
    LeaseKeeper k = keeper();
    k.step(start + 1s, LeaseTick{});
    EXPECT_EQ(k.step(start + 1s, LeaseRefused{record_of(FencingToken{8}, Status::processing)}),
              LeaseAction::overtaken);
    EXPECT_TRUE(k.overtaken());
    EXPECT_EQ(k.step(start + 9s, LeaseTick{}), LeaseAction::none);
    EXPECT_EQ(k.step(start + 9s, LeaseRefused{record_of(FencingToken{9}, Status::processing)}),
              LeaseAction::none);

    LeaseKeeper same_token = keeper();
    auto other_nonce = std::make_shared<Record>(*record_of(FencingToken{7}, Status::processing));
    other_nonce->nonce.bytes[0] = 1;
    same_token.step(start + 1s, LeaseTick{});
    EXPECT_EQ(same_token.step(start + 1s, LeaseRefused{other_nonce}), LeaseAction::overtaken);
}

TEST(LeaseKeeper, an_owner_given_up_but_not_replaced_carries_on) {
    const RecordPtr carry_on[] = {record_of(FencingToken{7}, Status::unknown),
                                  record_of(FencingToken{7}, Status::failed),
                                  record_of(FencingToken{7}, Status::completed), nullptr};
    for (const RecordPtr& record : carry_on) {
        LeaseKeeper k = keeper();
        k.step(start + 1s, LeaseTick{});
        EXPECT_EQ(k.step(start + 1s, LeaseRefused{record}), LeaseAction::none);
        EXPECT_FALSE(k.overtaken());
    }
    LeaseKeeper cancelled = keeper();
    cancelled.step(start + 1s, LeaseTick{});
    EXPECT_EQ(
        cancelled.step(start + 1s, LeaseRefused{record_of(FencingToken{7}, Status::failed, true)}),
        LeaseAction::overtaken);
}

}  // namespace
}  // namespace semel::core
