#include "stores/redis/query.hpp"

#include <utility>

namespace semel::stores::redis {

Query::Query(asio::io_context& io, Question question, Judge judge, Done done)
    : io_(io),
      question_(std::move(question)),
      judge_(std::move(judge)),
      done_(std::move(done)),
      timer_(io) {}

void Query::start() { next(); }

void Query::next() {
    if (at_ == question_.places.size()) return finish(std::move(worst_));
    Link::User& user = *this;
    link_ = std::make_shared<Link>(io_, question_.tls, user);
    link_->open(question_.places[at_], question_.limit);
}

void Query::link_opened() {
    const auto ask = [this](const std::vector<std::string>& words) {
        append_command(link_->out(), plain_command(words), ScriptForm::sha1);
    };
    authenticating_ = !question_.password.empty() || !question_.user.empty();
    if (authenticating_ && question_.user.empty()) ask({"AUTH", question_.password});
    if (authenticating_ && !question_.user.empty())
        ask({"AUTH", question_.user, question_.password});
    ask(question_.words);
    link_->send();
    timer_.expires_after(question_.limit);
    timer_.async_wait([self = shared_from_this(), at = at_](error_code ec) {
        if (ec || self->at_ != at || self->link_ == nullptr) return;
        self->failed({.code = base::ErrorCode::store_unavailable,
                      .detail = self->question_.places[self->at_].name() +
                                " accepts connections, but does not answer within " +
                                std::to_string(self->question_.limit.count()) +
                                " ms: is it frozen?"});
    });
}

void Query::link_received(Reply&& reply) {
    const Place& place = question_.places[at_];
    if (std::exchange(authenticating_, false)) {
        if (reply.kind != Reply::Kind::error) return;
        return failed({.code = base::ErrorCode::invalid_argument,
                       .detail = place.name() + " refuses user and password (" +
                                 reply.text.substr(0, reply.text.find(' ')) +
                                 "): compare them with its ACL"});
    }
    if (auto why = judge_(place, reply)) return failed(std::move(*why));
    finish({});
}

void Query::link_broken(base::Error why) { failed(std::move(why)); }

void Query::failed(base::Error why) {
    // A setting that is wrong tells more than a server that is down.
    if (!worst_ || worst_->code != base::ErrorCode::invalid_argument) worst_ = std::move(why);
    const auto self = shared_from_this();
    timer_.cancel();
    std::exchange(link_, nullptr)->close();
    ++at_;
    next();
}

void Query::finish(std::optional<base::Error> why) {
    const auto self = shared_from_this();
    const Done done = std::exchange(done_, nullptr);
    cancel();
    if (done) done(std::move(why));
}

void Query::cancel() {
    done_ = nullptr;
    timer_.cancel();
    if (link_ != nullptr) std::exchange(link_, nullptr)->close();
    at_ = question_.places.size();
}

}  // namespace semel::stores::redis
