#include "stores/redis/connection.hpp"

#include <algorithm>
#include <charconv>

#include "stores/redis/refusal.hpp"

namespace semel::stores::redis {

namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::steady_clock;

// One write: enough that a bigger one gains nothing, little enough that what waits behind it can
// still be taken back.
constexpr std::size_t kWriteBytes = 256 * 1024;
constexpr milliseconds kTimeEvery{500};
// Above this, a server counts as having been away, and a clock reading as too vague.
constexpr milliseconds kSilent{1000};

base::Error unavailable(std::string why) {
    return {.code = base::ErrorCode::store_unavailable, .detail = std::move(why)};
}
base::Error invalid(std::string why) {
    return {.code = base::ErrorCode::invalid_argument, .detail = std::move(why)};
}

std::int64_t us_of(SteadyTime t) {
    return duration_cast<microseconds>(t.time_since_epoch()).count();
}

}  // namespace

milliseconds Shared::backoff(milliseconds first, milliseconds most, unsigned tries) {
    constexpr unsigned kMostDoublings = 16;
    const milliseconds whole = std::min(most, first * (1 << std::min(tries, kMostDoublings)));
    std::uniform_int_distribution<std::int64_t> part(whole.count() / 2, whole.count());
    return milliseconds{std::max<std::int64_t>(1, part(random))};
}

Connection::Connection(Shared& shared, Host& host, std::string name, bool must_be_master)
    : shared_(shared),
      host_(host),
      name_(std::move(name)),
      must_be_master_(must_be_master),
      timer_(shared.io),
      last_used_(steady_clock::now()) {}

// ---------------------------------------------------------------- opening

void Connection::start() {
    state_ = State::locating;
    host_.locate(*this);
}

void Connection::open_at(Place place) {
    if (state_ != State::locating) return;
    state_ = State::opening;
    place_ = std::move(place);
    Link::User& user = *this;
    link_ = std::make_shared<Link>(shared_.io, shared_.tls, user);
    link_->open(place_, shared_.options.connect_timeout);
}

void Connection::cannot_open(base::Error why) {
    if (state_ == State::locating) lose(std::move(why));
}

void Connection::reconnect_later() {
    state_ = State::down;
    timer_.expires_after(
        shared_.backoff(shared_.options.backoff_first, shared_.options.backoff_max, failures_++));
    timer_.async_wait([self = weak_from_this()](error_code ec) {
        const auto me = self.lock();
        if (!ec && me != nullptr && me->state_ == State::down) me->start();
    });
}

void Connection::link_opened() {
    const ClientOptions& options = shared_.options;
    std::string& out = link_->out();
    const auto ask = [&](Step step, const std::vector<std::string>& words) {
        append_command(out, plain_command(words), ScriptForm::sha1);
        steps_.push_back(step);
    };
    state_ = State::setup;
    steps_.clear();
    if (!options.target.user.empty()) {
        ask(Step::auth, {"AUTH", options.target.user, options.target.password});
    } else if (!options.target.password.empty()) {
        ask(Step::auth, {"AUTH", options.target.password});
    }
    ask(Step::cluster, {"INFO", "cluster"});
    if (must_be_master_) ask(Step::role, {"ROLE"});
    if (options.target.database != 0)
        ask(Step::select, {"SELECT", std::to_string(options.target.database)});
    for (const Script* script : options.scripts)
        ask(Step::script, {"SCRIPT", "LOAD", std::string(script->source)});
    writing_ = true;
    link_->send();
    timer_.expires_after(options.connect_timeout);
    timer_.async_wait([self = weak_from_this()](error_code ec) {
        const auto me = self.lock();
        if (ec || me == nullptr || me->state_ != State::setup) return;
        me->lose(unavailable(me->name_ + " accepts connections, but does not answer within " +
                             std::to_string(me->shared_.options.connect_timeout.count()) +
                             " ms: is it frozen, or busy with a long command?"));
    });
}

std::optional<base::Error> Connection::setup_problem(Step step, const Reply& reply) const {
    const ClientOptions& options = shared_.options;
    const bool error = reply.kind == Reply::Kind::error;
    const std::string_view text = reply.text;
    const std::string at = "the server " + name_ + " ";
    // Before everything else: the server is on its way up, or down, and nothing is wrong with the
    // settings.
    if (error) {
        const Refusal refusal = judge(text, name_, "the first commands");
        if (refusal.cure == Cure::later) return unavailable(refusal.sentence);
        if (text.find("max number of clients") != std::string_view::npos)
            return unavailable(at + "is at its maxclients: raise it, or close other connections");
        if (text.starts_with("DENIED"))
            return invalid(
                at + "is in protected mode: give it a password, or bind it to a private address");
        if (text.starts_with("NOAUTH") || text.starts_with("WRONGPASS"))
            return invalid(refusal.sentence);
    }
    const bool forbidden = error && text.starts_with("NOPERM");
    switch (step) {
        case Step::auth:
            if (!error) return {};
            if (text.find("without any password") != std::string_view::npos)
                return invalid(
                    at +
                    "has no password, but the URL gives one: remove it there, or set requirepass");
            return invalid(at + "refuses AUTH (" + std::string(text) + ")");
        case Step::cluster: {
            if (forbidden) return {};
            if (error || text.find("cluster_enabled:") == std::string_view::npos)
                return invalid(
                    "what answers at " + name_ + " does not answer INFO as Redis 7 does" +
                    (error ? " (" + std::string(text.substr(0, 100)) + ")" : std::string{}));
            const bool cluster = text.find("cluster_enabled:1") != std::string_view::npos;
            if (cluster && !options.cluster)
                return invalid(at + "is a node of a Redis Cluster: set `cluster: true`");
            if (!cluster && options.cluster)
                return invalid(at + "is not a node of a Redis Cluster: remove `cluster: true`");
            return {};
        }
        case Step::role:
            if (error)
                return invalid(at + "does not permit ROLE to this user: extend the user's ACL");
            if (!reply.elements.empty() && reply.elements[0].text == "master") return {};
            return unavailable(
                "the sentinels name " + name_ +
                " as the master, but it is a replica: a failover is probably under way");
        case Step::select:
            if (!error) return {};
            return invalid(at + "has no database " + std::to_string(options.target.database) +
                           " (" + std::string(text) + ")");
        case Step::script:
            // Without the permission the scripts are sent whole.
            if (!error || forbidden) return {};
            return invalid(at + "refuses a script (" + std::string(text) +
                           "); Redis 7.0 or newer is needed");
        case Step::time:
            if (reply.kind == Reply::Kind::array && reply.elements.size() == 2) return {};
            return invalid(at + "does not tell its TIME (" + std::string(text) +
                           "): extend the user's ACL by +time");
    }
    return {};
}

void Connection::set_up(const Reply& reply) {
    if (steps_.empty()) return lose(unavailable(name_ + " answers what it was not asked"));
    const Step step = steps_.front();
    steps_.pop_front();
    if (auto problem = setup_problem(step, reply)) return lose(std::move(*problem));
    if (step == Step::time) {
        heard_time(reply);
        return become_ready();
    }
    if (steps_.empty() && !writing_) set_up_clock();
}

// Alone, after everything that takes the server's time: the clock is read half-way between question
// and answer.
void Connection::set_up_clock() {
    steps_.push_back(Step::time);
    ask_time();
    writing_ = true;
    link_->send();
}

void Connection::become_ready() {
    timer_.cancel();
    state_ = State::ready;
    failures_ = 0;
    problem_ = {};
    time_due_ = false;
    shared_.connections.fetch_add(1, std::memory_order_relaxed);
    host_.connection_ready(*this);
    flush();
}

// ---------------------------------------------------------------- speaking

void Connection::ask_time() {
    append_command(link_->out(), plain_command({"TIME"}), ScriptForm::sha1);
    asked_time_ = steady_clock::now();
    time_asked_ = true;
}

void Connection::heard_time(const Reply& reply) {
    time_asked_ = false;
    const SteadyTime now = steady_clock::now();
    if (reply.elements.size() != 2 || now - asked_time_ > kSilent) return;
    std::int64_t parts[2] = {};
    for (std::size_t i = 0; i < 2; ++i) {
        const std::string& text = reply.elements[i].text;
        std::from_chars(text.data(), text.data() + text.size(), parts[i]);
    }
    const std::int64_t server = parts[0] * 1'000'000 + parts[1];
    host_.clock_offset(server - (us_of(asked_time_) + us_of(now)) / 2);
}

void Connection::flush() {
    if (state_ != State::ready || writing_ || leaving_ || (waiting_.empty() && !time_due_)) return;
    std::string& out = link_->out();
    const bool nothing_sent = sent_.empty();
    bool wait = false;
    const auto own = [this](Pending::Role role) {
        Pending pending;
        pending.role = role;
        sent_.push_back(std::move(pending));
    };
    if (time_due_) {
        time_due_ = false;
        ask_time();
        own(Pending::Role::time);
    }
    while (!waiting_.empty() && out.size() < kWriteBytes) {
        Pending& next = waiting_.front();
        if (next.asking) {
            append_command(out, plain_command({"ASKING"}), ScriptForm::sha1);
            own(Pending::Role::asking);
        }
        append_command(out, next.command, next.form);
        wait |= next.command.writes;
        sent_.push_back(std::move(next));
        waiting_.pop_front();
    }
    if (wait && shared_.options.wait_replicas > 0) {
        append_command(out,
                       plain_command({"WAIT", std::to_string(shared_.options.wait_replicas),
                                      std::to_string(shared_.options.wait_timeout.count())}),
                       ScriptForm::sha1);
        own(Pending::Role::wait);
    }
    if (nothing_sent) expecting_since_ = steady_clock::now();
    writing_ = true;
    link_->send();
}

void Connection::link_written() {
    writing_ = false;
    // Replies may be faster than the system's word that the bytes have left.
    if (state_ == State::setup && steps_.empty()) return set_up_clock();
    flush();
}

void Connection::link_heard() {
    const SteadyTime now = steady_clock::now();
    if (silence(now) > kSilent) host_.connection_woke(*this);
    expecting_since_ = now;
}

void Connection::link_received(Reply&& reply) {
    if (state_ == State::setup) return set_up(reply);
    if (sent_.empty()) return lose(unavailable(name_ + " answers what it was not asked"));
    Pending pending = std::move(sent_.front());
    sent_.pop_front();
    switch (pending.role) {
        case Pending::Role::asking:
            return;  // if it was refused, so is the command behind it
        case Pending::Role::time:
            return heard_time(reply);
        case Pending::Role::wait:
            return replicated(reply);
        case Pending::Role::command:
            break;
    }
    if (pending.batch == nullptr) return;  // nobody waits for it any more
    if (reply.kind == Reply::Kind::error) {
        if (pending.command.script != nullptr && pending.form == ScriptForm::sha1 &&
            reply.text.starts_with("NOSCRIPT")) {
            shared_.scripts_resent.fetch_add(1, std::memory_order_relaxed);
            pending.form = ScriptForm::source;
            waiting_.push_back(std::move(pending));
            return;
        }
        return host_.command_refused(*this, std::move(pending), reply);
    }
    if (pending.command.writes && shared_.options.wait_replicas > 0 && !pending.pinned) {
        held_.push_back({std::move(pending), std::move(reply)});
        return;
    }
    pending.answer(std::move(reply));
}

void Connection::link_read() {
    if (state_ != State::ready) return;
    leave_if_done(false);
    flush();
}

// The reply of WAIT: for everything held, which came before it.
void Connection::replicated(const Reply& reply) {
    const unsigned wanted = shared_.options.wait_replicas;
    const bool enough = reply.kind == Reply::Kind::integer && reply.integer >= wanted;
    std::deque<Held> held = std::exchange(held_, {});
    for (Held& one : held) {
        if (enough) {
            one.pending.answer(std::move(one.reply));
            continue;
        }
        if (one.pending.batch == nullptr) continue;
        shared_.not_replicated.fetch_add(1, std::memory_order_relaxed);
        std::string why =
            "the server " + name_ + " executed " + name_of(one.pending.command) + ", but only " +
            (reply.kind == Reply::Kind::integer ? std::to_string(reply.integer) : "0") + " of " +
            std::to_string(wanted) + " replicas confirmed it within " +
            std::to_string(shared_.options.wait_timeout.count()) +
            " ms: look at the replicas' connections, or lower wait_replicas";
        one.pending.answer(
            NoReply{.applied = base::Applied::unknown,
                    .detail = std::move(why),
                    .unconfirmed = std::make_shared<const Reply>(std::move(one.reply))});
    }
}

// ---------------------------------------------------------------- losing

std::string Connection::lost_sentence(const Pending& pending, const std::string& why) const {
    return name_of(pending.command) + " was sent to " + name_ +
           " and may have been executed, but its reply is lost: " + why;
}

void Connection::link_broken(base::Error why) { lose(std::move(why)); }

void Connection::lose(base::Error why) {
    if (state_ == State::closed || state_ == State::down) return;
    if (link_ != nullptr) link_->close();
    link_.reset();
    timer_.cancel();
    problem_ = why;
    leaving_ = writing_ = time_due_ = time_asked_ = false;
    std::deque<Pending> again;
    std::deque<Pending> unknown;
    const auto lost = [&](Pending& pending) {
        if (pending.batch == nullptr) return;
        pending.maybe_executed = true;
        pending.asking = false;
        (pending.command.repeatable ? again : unknown).push_back(std::move(pending));
    };
    for (Held& one : held_) lost(one.pending);
    for (Pending& one : sent_) lost(one);
    held_.clear();
    sent_.clear();
    std::move(waiting_.begin(), waiting_.end(), std::back_inserter(again));
    waiting_ = std::move(again);
    reconnect_later();
    // Before anybody hears of it: who asks on hearing must not find all well.
    host_.connection_lost(*this, why);
    shared_.lost_replies.fetch_add(unknown.size(), std::memory_order_relaxed);
    for (Pending& one : unknown) one.give_up(lost_sentence(one, why.detail));
}

void Connection::leave() {
    if (state_ != State::ready) return;
    leaving_ = true;
    leave_if_done(false);
}

void Connection::leave_if_done(bool at_once) {
    if (leaving_ && (at_once || (sent_.empty() && held_.empty())))
        lose(unavailable("the server " + name_ + " is no longer the master"));
}

void Connection::close(const std::string& why) {
    state_ = State::closed;
    timer_.cancel();
    if (link_ != nullptr) link_->close();
    for (Held& one : held_) one.pending.give_up(lost_sentence(one.pending, why));
    for (Pending& one : sent_) one.give_up(lost_sentence(one, why));
    for (Pending& one : waiting_) one.refuse(why);
    held_.clear();
    sent_.clear();
    waiting_.clear();
}

// ---------------------------------------------------------------- watching

bool Connection::quiet() const {
    const auto awaited = [](const Pending& one) { return one.batch != nullptr; };
    return waiting_.empty() && std::none_of(sent_.begin(), sent_.end(), awaited) &&
           std::none_of(held_.begin(), held_.end(),
                        [&](const Held& one) { return awaited(one.pending); });
}

milliseconds Connection::silence(SteadyTime now) const {
    if (state_ != State::ready || sent_.empty()) return milliseconds{0};
    return duration_cast<milliseconds>(now - expecting_since_);
}

std::optional<base::Error> Connection::problem(SteadyTime now) const {
    if (state_ != State::ready) {
        if (!problem_.detail.empty()) return problem_;
        return unavailable("the connection to " + name_ + " is being opened");
    }
    if (const milliseconds silent = silence(now); silent > kSilent) {
        return unavailable("the server " + name_ + " has not answered for " +
                           std::to_string(silent.count()) +
                           " ms: is it frozen, cut off, or busy with a long command?");
    }
    return {};
}

void Connection::tick(SteadyTime now) {
    const milliseconds patience = shared_.options.patience;
    if (std::exchange(used_, false)) last_used_ = now;
    if (std::any_of(waiting_.begin(), waiting_.end(),
                    [now](const Pending& one) { return one.expired(now); })) {
        const auto why = problem(now);
        const std::string sentence =
            "no answer within " + std::to_string(patience.count()) +
            " ms: " + (why ? why->detail : "the server " + name_ + " takes no more commands");
        for (Pending& one : waiting_) {
            if (one.expired(now)) one.refuse(sentence);
        }
        std::erase_if(waiting_, [](const Pending& one) { return one.batch == nullptr; });
    }
    // Their replies still come, so they keep their places.
    const auto too_late = [&](Pending& pending) {
        if (!pending.expired(now)) return;
        shared_.lost_replies.fetch_add(1, std::memory_order_relaxed);
        pending.give_up(name_of(pending.command) + " was sent to " + name_ +
                        ", but has no answer after " + std::to_string(patience.count()) +
                        " ms: it may still be executed; is the server frozen or overloaded?");
        pending.command.wire = {};
    };
    for (Pending& one : sent_) too_late(one);
    for (Held& one : held_) too_late(one.pending);
    leave_if_done(silence(now) > kSilent);
    if (state_ != State::ready) return;
    if (silence(now) > patience) {
        return lose(unavailable("the server " + name_ + " has not answered for " +
                                std::to_string(patience.count()) +
                                " ms, the connection is given up: is it frozen or cut off?"));
    }
    if (!time_asked_ && !time_due_ && now - asked_time_ >= kTimeEvery) time_due_ = true;
    flush();
}

}  // namespace semel::stores::redis
