// Commands as bytes, and bytes as replies: RESP2 by hiredis' reader.
#pragma once

#include <string>
#include <string_view>

#include "stores/redis/client.hpp"

struct redisReader;

namespace semel::stores::redis {

/// How a script is named to the server.
enum class ScriptForm { sha1, source };

/// Appends the whole command. `form` matters for scripts only.
void append_command(std::string& out, const Command& command, ScriptForm form);
/// A plain command from its words.
Command plain_command(const std::vector<std::string>& words);
/// What a message calls it: the script's name, or the command's first word. Never an argument.
std::string name_of(const Command& command);
/// host:port, or [host]:port of an IPv6 address.
std::string name_of(const Address& address);

/// Makes replies of a byte stream. Not thread-safe; does not move.
class ReplyReader {
  public:
    enum class Next {
        reply,
        more,    ///< Feed more bytes first.
        broken,  ///< Not RESP2, or an array above kMaxElements: see problem(). Stays so.
    };
    /// Of one array: far above everything that is asked for, and little enough to be allocated.
    static constexpr int kMaxElements = 1'000'000;

    ReplyReader();
    ~ReplyReader();
    ReplyReader(const ReplyReader&) = delete;
    ReplyReader& operator=(const ReplyReader&) = delete;
    /// `bytes` must stay until next() wants more.
    void feed(std::string_view bytes) { unread_ = bytes; }
    Next next(Reply& reply);
    [[nodiscard]] std::string problem() const;

  private:
    redisReader* reader_;
    std::string_view unread_;
    Reply root_;  // being built
};

}  // namespace semel::stores::redis
