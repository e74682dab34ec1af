// The language between two gateways of one store: how a follower asks for a flight, proves who it
// is, and gets the flight's journal as frames. docs/internals/peer.md describes it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "base/hash.hpp"
#include "core/record.hpp"

namespace semel::gateway {

/// Every frame begins with its kind (one byte) and the length of what follows (four, big endian).
inline constexpr std::size_t peer_frame_head_bytes = 5;
/// A hello that says another number is refused: the follower falls back to the record.
inline constexpr std::uint8_t peer_wire_version = 1;
inline constexpr std::size_t peer_data_max_bytes = 64 * 1024;
inline constexpr std::size_t peer_content_type_max_bytes = 1024;
inline constexpr std::size_t peer_headers_max_bytes = 64 * 1024;
inline constexpr std::size_t peer_nonce_bytes = 16;
inline constexpr std::string_view peer_content_type = "application/x-semel-flight";
inline constexpr std::string_view peer_nonce_header = "Semel-Peer-Nonce";
inline constexpr std::string_view peer_scheme = "Semel-Peer ";

/// Which bytes of which attempt are asked for.
struct PeerQuestion {
    core::StoredKey key;
    core::FencingToken token;
    std::uint64_t from = 0;  ///< Of the answer's body: what comes before it is known already.

    friend bool operator==(const PeerQuestion&, const PeerQuestion&) = default;
};

std::string peer_target(const PeerQuestion& question);
/// Nullopt: not the target of a flight.
std::optional<PeerQuestion> parse_peer_target(std::string_view target);

/// What a follower sends as `Authorization` (after the scheme): an HMAC, under the secret that the
/// deployment keeps in its store, of what it asks and of a nonce that it uses once.
std::string peer_proof(const base::Hmac& secret, std::string_view target, std::string_view nonce);
/// How the other side shows that it knows the secret, too: an answer to that nonce.
base::Digest peer_answer_proof(const base::Hmac& secret, std::string_view nonce);

// ---- frames

/// The first of all. The other gateway may not know yet whether it has the flight.
struct PeerHello {
    base::Digest proof;
};
/// Once, before any data.
struct PeerHead {
    int status = 200;
    std::string content_type;
    std::string kept_headers;  ///< Ready lines, checked: names are tokens, no value ends its line.
    std::optional<std::uint64_t> content_length;
    std::uint32_t attempt = 1;
    bool streaming = false;
    bool from_gateway = false;
    bool takeover = false;
};
struct PeerData {
    std::string_view bytes;  ///< Never empty. Valid during the call.
    /// Belongs to the last bytes, which clients get with the end only. No data without it follows.
    bool last = false;
};
/// Nothing happened, and the process lives.
struct PeerPing {};
/// The last of all.
struct PeerEnd {
    enum class How : std::uint8_t {
        whole = 1,     ///< The answer is complete.
        cut = 2,       ///< It ended short: the followers' answers end visibly broken.
        moved_on = 3,  ///< Overtaken: the record belongs to another attempt.
        gone = 4,      ///< This process does not run that attempt (any more): ask the store.
    };
    How how = How::gone;
    bool record_pending = false;
    core::StoreTime expires;
};
using PeerFrame = std::variant<PeerHello, PeerHead, PeerData, PeerPing, PeerEnd>;

/// Appends the frame to `out`. Data longer than peer_data_max_bytes is for several frames.
void write_frame(std::string& out, const PeerFrame& frame);

/// Reads frames as their bytes come, in any pieces. What it lets through is in order: a hello, at
/// most one head, data only after it, an end, nothing more.
class PeerReader {
  public:
    enum class State : std::uint8_t { open, ended, refused };

    /// Takes all of `bytes`.
    void feed(std::string_view bytes);
    /// The next whole frame; valid until the next call of either. Nullopt: more bytes are needed,
    /// or the end was given, or the bytes are refused (state() says which).
    std::optional<PeerFrame> next();
    [[nodiscard]] State state() const { return state_; }
    /// Why, in words for a log: nothing of what was read.
    [[nodiscard]] std::string_view refusal() const { return refusal_; }

  private:
    std::optional<PeerFrame> refuse(std::string_view why);
    std::optional<PeerFrame> decode(char kind, std::string_view payload);

    std::string pending_;
    std::size_t read_ = 0;  ///< Of pending_, given out already.
    State state_ = State::open;
    std::string_view refusal_;
    bool hello_ = false;
    bool head_ = false;
    bool last_ = false;
};

}  // namespace semel::gateway
