#include "gateway/chat_door.hpp"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "base/assert.hpp"
#include "base/json_scan.hpp"
#include "gateway/chat_api.hpp"

namespace semel::gateway {

namespace {

/// The request and the answer of one turn, in memory: its client never leaves and reads at once.
class Slip final : public http::Exchange {
  public:
    explicit Slip(const InnerTurn& turn) : user_(turn.user) {
        // As a quoted string (RFC 8941): any visible character is told apart from the quotes.
        key_ = "\"";
        for (const char c : turn.request_id) {
            if (c == '"' || c == '\\') key_ += '\\';
            key_ += c;
        }
        key_ += '"';
        body_ = R"({"content":)";
        base::append_json_string(body_, turn.prompt);
        body_ += R"(,"sessionId":)";
        base::append_json_string(body_, turn.session);
        if (!turn.model.empty()) {
            body_ += R"(,"model":)";
            base::append_json_string(body_, turn.model);
        }
        body_ += '}';
        head_.method = "POST";
        head_.target = "/api/chat";
        head_.path = head_.target;
        head_.headers = {{"Idempotency-Key", key_}, {"X-User-Id", user_}};
        head_.content_length = body_.size();
    }

    [[nodiscard]] const http::RequestHead& head() const override { return head_; }
    [[nodiscard]] std::string peer() const override { return "this process"; }
    Task<http::BodyStatus> read_body(std::string& into, std::uint64_t limit) override {
        if (body_.size() > limit) co_return http::BodyStatus::too_large;
        into = std::move(body_);
        body_.clear();
        co_return http::BodyStatus::ok;
    }
    Task<http::BodyPiece> read_some() override {
        read_ = std::move(body_);
        body_.clear();
        co_return http::BodyPiece{http::BodyStatus::ok, read_};
    }
    using http::Exchange::respond;
    Task<bool> respond(const http::ResponseHead& head,
                       std::span<const std::string_view> body) override {
        begin(head, std::nullopt);
        for (const std::string_view piece : body) answer_ += piece;
        whole_ = true;
        co_return true;
    }
    void begin(const http::ResponseHead& head, std::optional<std::uint64_t>) override {
        SEMEL_ASSERT(status_ == 0, "a handler gives one answer");
        status_ = head.status;
        headers_ = head.headers;
    }
    Task<bool> write(std::string_view bytes) override {
        answer_ += bytes;
        co_return true;
    }
    Task<bool> finish(std::string_view last) override {
        answer_ += last;
        whole_ = true;
        co_return true;
    }
    void cut() override { whole_ = false; }
    bool client_gone() override { return false; }

    [[nodiscard]] int status() const { return status_; }
    [[nodiscard]] bool whole() const { return whole_; }
    [[nodiscard]] std::string& answer() { return answer_; }
    [[nodiscard]] std::string_view header(std::string_view name) const {
        std::string_view rest = headers_;
        while (!rest.empty()) {
            const std::string_view line = rest.substr(0, rest.find("\r\n"));
            rest.remove_prefix(std::min(rest.size(), line.size() + 2));
            const auto colon = line.find(": ");
            if (colon != std::string_view::npos && http::name_is(line.substr(0, colon), name))
                return line.substr(colon + 2);
        }
        return {};
    }

  private:
    std::string key_, user_, body_, read_;
    http::RequestHead head_;  ///< Views into the above.
    int status_ = 0;
    bool whole_ = false;
    std::string headers_;
    std::string answer_;
};

/// The end of a problem object's `type`.
std::string slug_of(std::string_view body) {
    const auto members = base::top_level_members(body);
    const auto raw = members ? base::find_member(*members, "type") : std::nullopt;
    const std::string type = raw ? base::json_string(*raw).value_or("") : "";
    return type.substr(type.rfind('/') + 1);
}

}  // namespace

/// The door at one loop.
class ChatDoor::Desk {
  public:
    Desk(Process::State& state, Place place, std::chrono::milliseconds patience)
        : state_(state), engine_(place.engine), chat_(state, place.engine, place.client) {
        routes_.fill(state.chat_route);
        for (config::RouteConfig& route : routes_) {
            route.on_running = config::OnRunning::join;
            route.join_timeout = std::min(route.join_timeout, patience);
        }
        routes_.back().on_unknown = config::OnUnknown::hold;
    }

    void ask(InnerTurn turn, std::function<void(InnerAnswer)> done) {
        engine_.loop().post([this, turn = std::move(turn), done = std::move(done)]() mutable {
            engine_.loop().spawn(answer(std::move(turn), std::move(done)));
        });
    }

  private:
    Task<> answer(InnerTurn turn, std::function<void(InnerAnswer)> done) {
        Slip slip(turn);
        const Caller caller{.tenant = tenant_of_client(turn.tenant),
                            .may_name_users = true,
                            .inner_route = &routes_[turn.hold_unknown ? 1 : 0]};
        SEMEL_ASSERT(caller.tenant.size() <= core::key_part_max_bytes,
                     "a client's name is checked where it is configured");
        co_await chat_.handle(slip, caller);
        SEMEL_ASSERT(slip.status() != 0, "every turn is answered");
        InnerAnswer said{.status = slip.status(),
                         .replayed = slip.header("X-Idempotent-Replayed") == "true"};
        const std::string_view after = slip.header("Retry-After");
        unsigned seconds = 0;
        if (std::from_chars(after.data(), after.data() + after.size(), seconds).ec == std::errc{})
            said.retry_after = std::chrono::seconds{seconds};
        if (!slip.whole()) {
            // The answer is recorded and could not be read back this time.
            said.status = 503;
            said.problem = "store-unavailable";
        } else if (said.status >= 200 && said.status < 300) {
            said.body = std::move(slip.answer());
        } else {
            said.problem = slug_of(slip.answer());
            if (said.problem == "upstream-failed") co_await look_up(turn, caller, said);
        }
        done(std::move(said));
    }

    /// /api/chat tells its clients 502 for most of what an upstream answers; the record knows more.
    Task<> look_up(const InnerTurn& turn, const Caller& caller, InnerAnswer& said) {
        const core::StoredKey key = stored_key(state_.hmac, {.tenant = caller.tenant,
                                                             .operation = "chat",
                                                             .user = turn.user,
                                                             .session = turn.session,
                                                             .id = turn.request_id});
        const auto found = co_await engine_.get(key);
        if (!found || !*found || (*found)->status != core::Status::failed) co_return;
        said.final = (*found)->final;
        if ((*found)->failure.code == "upstream-status")
            said.upstream_status = (*found)->failure.http_status;
    }

    Process::State& state_;
    engine::Engine& engine_;
    ChatApi chat_;
    /// /api/chat's dials as a turn from within has them: joining; with the outcome held, where it
    /// asks for that.
    std::array<config::RouteConfig, 2> routes_;
};

ChatDoor::ChatDoor(Process& process, std::vector<Place> places,
                   std::chrono::milliseconds patience) {
    SEMEL_ASSERT(!places.empty(), "a door leads to at least one loop");
    for (const Place& place : places)
        desks_.push_back(std::make_unique<Desk>(process.state(), place, patience));
}
ChatDoor::~ChatDoor() = default;

void ChatDoor::ask(InnerTurn turn, std::function<void(InnerAnswer)> done) {
    if (closed_.load(std::memory_order_acquire)) {
        done({});
        return;
    }
    const std::size_t turn_of = next_.fetch_add(1, std::memory_order_relaxed);
    desks_[turn_of % desks_.size()]->ask(std::move(turn), std::move(done));
}

}  // namespace semel::gateway
