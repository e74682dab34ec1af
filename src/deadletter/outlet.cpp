#include "deadletter/outlet.hpp"

#include <utility>

namespace semel::deadletter {

Outlet::Outlet(brokers::Publisher& publisher, Target target, Form form, Redaction redaction)
    : publisher_(publisher),
      target_(std::move(target)),
      form_(form),
      redaction_(std::move(redaction)) {}

void Outlet::publish(const brokers::Delivery& delivery, const Circumstances& about,
                     std::function<void(base::Result<void>)> done) {
    brokers::Outgoing letter = make_letter(delivery, about, form_);
    letter.topic = target_.topic;
    letter.properties.exchange = target_.exchange;
    if (redaction_) redaction_(letter);
    publisher_.publish(std::move(letter),
                       [done = std::move(done)](base::Result<brokers::PublishedAt> where) {
                           done(where ? base::Result<void>() : std::move(where.error()));
                       });
}

}  // namespace semel::deadletter
