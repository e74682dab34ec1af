// ChatShape: an OpenAI-dialect upstream's answer as /api/chat's object, or its stream as delta and
// done events.
#pragma once

#include <string>

#include "gateway/shape.hpp"

namespace semel::gateway {

class ChatShape final : public AnswerShape {
  public:
    struct Asked {
        std::string request_id;
        std::string model;  ///< As asked of the upstream; the answer's own name for it wins.
        std::string user_content;
        core::StoredKey conversation;
    };
    explicit ChatShape(Asked asked) : asked_(std::move(asked)) { usage_.model = asked_.model; }

    Piece on_event(std::string_view raw, std::string_view event, std::string_view data) override;
    std::string on_rest(std::string_view) override { return {}; }
    AnswerHead stream_head(AnswerHead upstream) override;
    std::optional<Rendered> on_answer(AnswerHead upstream, std::string body) override;
    [[nodiscard]] bool passes_unread() const override { return false; }
    Rendered on_failure(AnswerHead upstream, std::string body) override;
    Rendered on_problem(const Problem& problem) override;
    std::optional<std::string> broken_tail(const Problem& problem) override;
    [[nodiscard]] std::optional<core::Append> append() const override;
    void set_attempt(std::uint32_t attempt) override { attempt_ = attempt; }

  private:
    [[nodiscard]] std::string object() const;

    Asked asked_;
    std::uint32_t attempt_ = 1;
    std::string content_;
};

}  // namespace semel::gateway
