#include "brokers/delayed.hpp"

#include <charconv>
#include <limits>

namespace semel::brokers {

namespace {

/// The last of that name; nullopt: there is none, or it is null.
std::optional<std::string_view> header_of(const Delivery& delivery, std::string_view name) {
    std::optional<std::string_view> found;
    for (const Header& one : delivery.headers) {
        if (one.name == name) found = one.value;
    }
    return found;
}

std::optional<std::int64_t> number(std::string_view text) {
    std::int64_t out = 0;
    const char* const end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data(), end, out);
    if (error != std::errc() || at != end || out < 0) return std::nullopt;
    return out;
}

}  // namespace

std::string in_words(const Position& position) {
    return position.partition.topic + "-" + std::to_string(position.partition.number) + "-" +
           std::to_string(position.offset);
}

std::optional<std::int64_t> due_of(const Delivery& delivery) {
    const auto text = header_of(delivery, due_header);
    return text ? number(*text) : std::nullopt;
}

std::optional<Position> copied_from(const Delivery& delivery) {
    const auto text = header_of(delivery, copy_of_header);
    if (!text) return std::nullopt;
    // From its end: a topic's name may hold the same sign.
    const auto second = text->rfind('-');
    if (second == std::string_view::npos || second == 0) return std::nullopt;
    const auto first = text->rfind('-', second - 1);
    if (first == std::string_view::npos || first == 0) return std::nullopt;
    const auto partition = number(text->substr(first + 1, second - first - 1));
    const auto offset = number(text->substr(second + 1));
    if (!partition || !offset || *partition > std::numeric_limits<std::int32_t>::max())
        return std::nullopt;
    return Position{
        .partition = {std::string(text->substr(0, first)), static_cast<std::int32_t>(*partition)},
        .offset = *offset};
}

}  // namespace semel::brokers
