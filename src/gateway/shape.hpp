// AnswerShape: turns what the upstream says into what this route's clients get and what the record
// keeps.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/operation.hpp"
#include "gateway/dialects/openai.hpp"
#include "gateway/journal.hpp"
#include "gateway/problem.hpp"

namespace semel::gateway {

/// One per attempt, used by its owner only.
class AnswerShape {
  public:
    AnswerShape() = default;
    AnswerShape(const AnswerShape&) = delete;
    AnswerShape& operator=(const AnswerShape&) = delete;
    virtual ~AnswerShape() = default;

    struct Piece {
        std::string bytes;      ///< For the clients; may be empty.
        bool terminal = false;  ///< The answer is complete with this.
        bool error = false;     ///< It can no longer become complete.
    };
    /// One event of the upstream's stream, as its raw bytes and what the scanner made of them.
    virtual Piece on_event(std::string_view raw, std::string_view event, std::string_view data) = 0;
    /// Raw bytes of the stream that belong to no event (comments, or what follows the terminal
    /// event).
    virtual std::string on_rest(std::string_view raw) = 0;
    /// The 200 head of a streamed answer, given the upstream's.
    virtual AnswerHead stream_head(AnswerHead upstream) = 0;

    /// A whole plain 2xx answer. Nullopt: it is not a complete answer, and `refused` says what
    /// clients get instead.
    struct Rendered {
        AnswerHead head;
        std::string body;
    };
    virtual std::optional<Rendered> on_answer(AnswerHead upstream, std::string body) = 0;
    /// Whether a plain answer may leave as it comes, unread (too large to hold); else it must be
    /// seen whole.
    [[nodiscard]] virtual bool passes_unread() const = 0;
    /// Any answer that is not a complete 2xx, and our own errors.
    virtual Rendered on_failure(AnswerHead upstream, std::string body) = 0;
    virtual Rendered on_problem(const Problem& problem) = 0;
    /// What ends a stream that broke after its first bytes, and whether that is a visible end by
    /// itself (else it is cut).
    virtual std::optional<std::string> broken_tail(const Problem& problem) = 0;

    [[nodiscard]] const core::Usage& usage() const { return usage_; }
    /// What to write into the conversation in the step of complete.
    [[nodiscard]] virtual std::optional<core::Append> append() const { return std::nullopt; }
    /// Told before the call, for shapes that show it.
    virtual void set_attempt(std::uint32_t) {}

  protected:
    core::Usage usage_;
};

/// OpenAI dialect: the upstream's bytes, less the usage chunk where we asked for it and the client
/// did not.
class OpenAiShape final : public AnswerShape {
  public:
    explicit OpenAiShape(bool strip_usage) : strip_usage_(strip_usage) {}
    Piece on_event(std::string_view raw, std::string_view event, std::string_view data) override;
    std::string on_rest(std::string_view raw) override { return std::string(raw); }
    AnswerHead stream_head(AnswerHead upstream) override { return upstream; }
    std::optional<Rendered> on_answer(AnswerHead upstream, std::string body) override;
    [[nodiscard]] bool passes_unread() const override { return true; }
    Rendered on_failure(AnswerHead upstream, std::string body) override;
    Rendered on_problem(const Problem& problem) override;
    std::optional<std::string> broken_tail(const Problem&) override { return std::nullopt; }

  private:
    bool strip_usage_;
};

}  // namespace semel::gateway
