#include "core/lease_keeper.hpp"

#include "base/assert.hpp"

namespace semel::core {
namespace {

template <class... F>
struct Overloaded : F... {
    using F::operator()...;
};

/// Whether the owner's answer can no longer become the record.
bool lost(const Record& record, FencingToken token, const Nonce& nonce) {
    if (record.token != token || record.nonce != nonce) return true;
    // Given up but not replaced (UNKNOWN, a FAILED that is not final): the owner may still bring
    // the truth. COMPLETED under one's own token is one's own complete, whose reply was lost.
    return record.status == Status::failed && record.final;
}

}  // namespace

LeaseAction LeaseKeeper::step(base::SteadyTime now, const LeaseEvent& event) {
    if (overtaken_) return LeaseAction::none;
    return std::visit(Overloaded{
                          [&](const LeaseTick&) {
                              // After a stall past the lease's end the renewal goes out all the
                              // same: only the store knows who holds it now.
                              if (asking_ || now < held_since_ + lease_ / ticks_per_lease)
                                  return LeaseAction::none;
                              asking_ = true;
                              sent_at_ = now;
                              return LeaseAction::renew;
                          },
                          [&](const LeaseRenewed&) {
                              SEMEL_ASSERT(asking_,
                                           "only a renewal that was sent can be confirmed");
                              asking_ = false;
                              held_since_ = sent_at_;
                              return LeaseAction::none;
                          },
                          [&](const LeaseRefused& refused) {
                              asking_ = false;
                              // A record that is gone is a claim the store lost: complete claims it
                              // anew.
                              if (!refused.record || !lost(*refused.record, token_, nonce_))
                                  return LeaseAction::none;
                              overtaken_ = true;
                              return LeaseAction::overtaken;
                          },
                          [&](const LeaseUnanswered&) {
                              asking_ = false;
                              return LeaseAction::none;
                          },
                      },
                      event);
}

}  // namespace semel::core
