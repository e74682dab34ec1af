// Script: exact bytes that the pretended upstream answers for one model, registered by POST
// /script.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace semel::mock {

struct Script {
    enum class End { finish, cut, stall };
    std::string model;
    int status = 200;
    std::string content_type = "text/event-stream";
    std::string headers;  ///< Further ones, as ready lines.
    std::vector<std::string> chunks;
    std::chrono::milliseconds gap{0};
    End end = End::finish;
};

/// Reads {"model": "m", "chunks": ["base64", ...], "gap_ms": 0, "status": 200, "content_type":
/// "...", "headers": {...}, "end": "finish|cut|stall"}; all but model and chunks may be left out.
/// Nullopt: it is not that.
std::optional<Script> parse_script(std::string_view json);

/// Standard base64 with padding (RFC 4648 section 4). Nullopt: it is not that.
std::optional<std::string> base64_decode(std::string_view text);

/// Thread-safe.
class Scripts {
  public:
    void put(Script script);
    [[nodiscard]] std::shared_ptr<const Script> find(std::string_view model) const;
    void reset();

  private:
    mutable std::mutex mutex_;
    std::map<std::string, std::shared_ptr<const Script>, std::less<>> scripts_;
};

}  // namespace semel::mock
