#include "gateway/shape.hpp"

namespace semel::gateway {

AnswerShape::Piece OpenAiShape::on_event(std::string_view raw, std::string_view event,
                                         std::string_view data) {
    const openai::EventMeaning meaning = openai::read_event(event, data, usage_);
    Piece piece{.terminal = meaning.terminal, .error = meaning.error};
    if (!(meaning.usage_only && strip_usage_)) piece.bytes = raw;
    return piece;
}

std::optional<AnswerShape::Rendered> OpenAiShape::on_answer(AnswerHead upstream, std::string body) {
    const bool json = upstream.content_type.find("json") != std::string::npos;
    if (json && !openai::read_answer(body, usage_)) return std::nullopt;
    return Rendered{std::move(upstream), std::move(body)};
}

AnswerShape::Rendered OpenAiShape::on_failure(AnswerHead upstream, std::string body) {
    openai::read_usage(body, usage_);
    return {std::move(upstream), std::move(body)};
}

AnswerShape::Rendered OpenAiShape::on_problem(const Problem& problem) {
    AnswerHead head;
    head.status = problem.status;
    head.content_type = content_type_of(Shape::openai);
    head.kept_headers = header_lines(problem);
    head.from_gateway = true;
    return {std::move(head), render(problem, Shape::openai)};
}

}  // namespace semel::gateway
