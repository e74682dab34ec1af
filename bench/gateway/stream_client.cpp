// Reads many event streams at once and says how far apart their events arrive. Prints one JSON
// object.
//
//     bench_stream_client --port N [--streams 200] [--events 50] [--gap 20] [--calls 1] [--reuse
//     0|1]
//                         [--key PREFIX] [--same-key KEY] [--spread MS] [--stamped 0|1]
//
// Each of `streams` places makes `calls` calls one after the other, on one connection (--reuse 1)
// or on a new one each, closed after its answer as OpenAI's synchronous client does (--reuse 0).
// The starts are spread over `spread` milliseconds. With
// --key each call has an id of its own, with --same-key all have that one. Times: an event counts
// as arrived when the read that holds its end returns; a gap is the time between two content events
// of one stream; events of one read have gap 0. With --stamped events say when they were sent, and
// the time from then to their arrival is measured too.
#include "net.hpp"

namespace {

using namespace bench;

/// A stream without a byte for so long is broken.
constexpr std::int64_t patience = 30 * second;

struct Totals {
    std::vector<std::int64_t> gaps;
    std::vector<std::int64_t> delays;  ///< Of stamped events.
    std::int64_t complete = 0;
    std::int64_t not_2xx = 0;
    std::int64_t errors = 0;  ///< Connections that failed or ended within an answer.
    std::int64_t incomplete =
        0;  ///< Ended in order, but with another number of events or without [DONE].
    std::int64_t different = 0;  ///< Bodies unlike the first one.
    std::string body;            ///< The first whole one.
};

struct Settings {
    std::int64_t port, streams, events, gap, calls, spread;
    bool reuse, stamped;
    std::string key, same_key;
};

class Place {
  public:
    Place(const Settings& settings, Totals& totals, Poll& poll, std::size_t index,
          std::int64_t start)
        : settings_(settings), totals_(totals), poll_(poll), index_(index), start_(start) {}

    [[nodiscard]] bool done() const { return call_ == settings_.calls; }
    [[nodiscard]] std::int64_t start() const { return started_ ? -1 : start_; }
    [[nodiscard]] bool silent(std::int64_t at) const {
        return started_ && !done() && at - last_byte_ > patience;
    }

    void begin() {
        started_ = true;
        last_byte_ = now();
        if (fd_ < 0) {
            fd_ = begin_connect(settings_.port);
            poll_.watch(fd_, EPOLLIN | EPOLLOUT, index_);
            connecting_ = true;
        } else {
            send_request();
        }
    }

    void on_event(std::uint32_t events) {
        if (fd_ < 0) return;
        if (connecting_) {
            int error = 0;
            socklen_t length = sizeof error;
            getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length);
            if (error != 0) return end(false);
            if ((events & EPOLLOUT) == 0) return;
            connecting_ = false;
            poll_.watch(fd_, EPOLLIN, index_, true);
            send_request();
            return;
        }
        char buffer[64 * 1024];
        const ssize_t got = read(fd_, buffer, sizeof buffer);
        if (got < 0 && errno == EAGAIN) return;
        last_byte_ = now();
        if (got <= 0) return end(answer_.closed());
        const auto piece = [this](std::string_view bytes) { take(bytes); };
        if (answer_.feed({buffer, static_cast<std::size_t>(got)}, piece)) end(true);
    }

  private:
    void send_request() {
        asked_ = now();
        answer_ = {};
        body_.clear();
        scanned_ = 0;
        arrived_ = 0;
        last_event_ = 0;
        const std::string model = (settings_.stamped ? "stamped-" : "stream-") +
                                  std::to_string(settings_.events) + "-" +
                                  std::to_string(settings_.gap);
        std::string key = settings_.same_key;
        if (key.empty() && !settings_.key.empty()) {
            key = settings_.key + "-" + std::to_string(index_) + "-" + std::to_string(call_);
        }
        const std::string request = chat_request(model, true, key, false);
        if (send(fd_, request.data(), request.size(), MSG_NOSIGNAL) !=
            static_cast<ssize_t>(request.size()))
            end(false);
    }

    /// A piece of the body, all of it read at last_byte_.
    void take(std::string_view bytes) {
        body_ += bytes;
        for (std::size_t end = body_.find("\n\n", scanned_); end != body_.npos;
             end = body_.find("\n\n", scanned_)) {
            const std::string_view event = std::string_view(body_).substr(scanned_, end - scanned_);
            scanned_ = end + 2;
            if (event.find(R"("delta":{"content")") == event.npos)
                continue;  // the end, or a comment
            constexpr std::string_view sent = R"("content":"sent )";
            if (const auto at = event.find(sent); at != event.npos) {
                // What was sent before it was asked for has waited for the asking.
                const std::int64_t stamp = std::atoll(event.data() + at + sent.size());
                if (stamp > asked_) totals_.delays.push_back(last_byte_ - stamp);
            }
            if (arrived_++ > 0) totals_.gaps.push_back(last_byte_ - last_event_);
            last_event_ = last_byte_;
        }
    }

    void end(bool whole) {
        if (!whole) {
            ++totals_.errors;
        } else if (!answer_.ok()) {
            ++totals_.not_2xx;
        } else if (arrived_ != settings_.events || !body_.ends_with("data: [DONE]\n\n")) {
            ++totals_.incomplete;
        } else {
            ++totals_.complete;
            if (totals_.body.empty()) totals_.body = body_;
            if (body_ != totals_.body && !settings_.stamped) ++totals_.different;
        }
        if (!settings_.reuse || !whole || !answer_.reusable()) {
            close(fd_);
            fd_ = -1;
        }
        ++call_;
        if (!done()) begin();
    }

    const Settings& settings_;
    Totals& totals_;
    Poll& poll_;
    const std::size_t index_;
    const std::int64_t start_;
    bool started_ = false;
    bool connecting_ = false;
    int fd_ = -1;
    std::int64_t call_ = 0;
    Answer answer_;
    std::string body_;
    std::size_t scanned_ = 0;
    std::int64_t arrived_ = 0;
    std::int64_t last_byte_ = 0;
    std::int64_t last_event_ = 0;
    std::int64_t asked_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    const Options options(argc, argv,
                          {{"port", ""},
                           {"streams", "200"},
                           {"events", "50"},
                           {"gap", "20"},
                           {"calls", "1"},
                           {"reuse", "0"},
                           {"key", ""},
                           {"same-key", ""},
                           {"spread", "200"},
                           {"stamped", "0"}});
    const Settings settings{.port = options.number("port"),
                            .streams = options.number("streams"),
                            .events = options.number("events"),
                            .gap = options.number("gap"),
                            .calls = options.number("calls"),
                            .spread = options.number("spread"),
                            .reuse = options.number("reuse") != 0,
                            .stamped = options.number("stamped") != 0,
                            .key = options.text("key"),
                            .same_key = options.text("same-key")};
    Poll poll;
    Totals totals;
    totals.gaps.reserve(
        static_cast<std::size_t>(settings.streams * settings.calls * settings.events));
    const std::int64_t start = now() + 5 * ms;
    std::vector<Place> places;
    for (std::int64_t i = 0; i < settings.streams; ++i) {
        places.emplace_back(settings, totals, poll, static_cast<std::size_t>(i),
                            start + settings.spread * ms * i / settings.streams);
    }
    std::size_t begun = 0;
    const auto all_done = [&] {
        return std::all_of(places.begin(), places.end(), [](const Place& p) { return p.done(); });
    };
    std::int64_t looked = start;
    while (!all_done()) {
        const bool more = begun < places.size();
        const int count = poll.wait(more ? places[begun].start() : now() + second);
        for (int i = 0; i < count; ++i)
            places[poll.events[i].data.u64].on_event(poll.events[i].events);
        const std::int64_t at = now();
        while (begun < places.size() && places[begun].start() <= at) places[begun++].begin();
        if (at - looked > second) {
            looked = at;
            for (std::size_t i = 0; i < places.size(); ++i) {
                if (places[i].silent(at))
                    fail("stream " + std::to_string(i) + " has been silent for 30 s");
            }
        }
    }
    std::sort(totals.gaps.begin(), totals.gaps.end());
    std::sort(totals.delays.begin(), totals.delays.end());
    const bool any = !totals.gaps.empty();
    const bool stamped = !totals.delays.empty();
    std::printf(
        "{\"calls\":%lld,\"complete\":%lld,\"not_2xx\":%lld,\"errors\":%lld,\"incomplete\":%lld,"
        "\"different\":%lld,"
        "\"body_bytes\":%zu,\"gaps\":%zu,\"p50_us\":%.1f,\"p99_us\":%.1f,\"max_us\":%.1f,"
        "\"delays\":%zu,\"delay_p50_us\":%.1f,\"delay_p99_us\":%.1f}\n",
        static_cast<long long>(settings.streams * settings.calls),
        static_cast<long long>(totals.complete), static_cast<long long>(totals.not_2xx),
        static_cast<long long>(totals.errors), static_cast<long long>(totals.incomplete),
        static_cast<long long>(totals.different), totals.body.size(), totals.gaps.size(),
        any ? quantile_us(totals.gaps, 0.50) : 0, any ? quantile_us(totals.gaps, 0.99) : 0,
        any ? quantile_us(totals.gaps, 1) : 0, totals.delays.size(),
        stamped ? quantile_us(totals.delays, 0.50) : 0,
        stamped ? quantile_us(totals.delays, 0.99) : 0);
}
