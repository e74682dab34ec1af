# Compiler, language and warnings of every target.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    message(FATAL_ERROR
        "GCC ${CMAKE_CXX_COMPILER_VERSION} is refused: GCC 12 destroys temporaries of co_await expressions twice "
        "(double free, without a warning). Use clang 19 (package clang-19): cmake --preset release.")
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(THREADS_PREFER_PTHREAD_FLAG ON)

add_library(semel_options INTERFACE)
target_compile_definitions(semel_options INTERFACE _GLIBCXX_ASSERTIONS SEMEL_VERSION="${SEMEL_VERSION}")
target_compile_options(semel_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
        -Wno-missing-field-initializers -Wno-missing-designated-field-initializers>)
if(SEMEL_WERROR)
    target_compile_options(semel_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(SEMEL_SANITIZE STREQUAL "address")
    target_compile_options(semel_options INTERFACE -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(semel_options INTERFACE -fsanitize=address,undefined)
elseif(SEMEL_SANITIZE STREQUAL "thread")
    target_compile_options(semel_options INTERFACE -fsanitize=thread -fno-omit-frame-pointer)
    target_link_options(semel_options INTERFACE -fsanitize=thread)
elseif(NOT SEMEL_SANITIZE STREQUAL "")
    message(FATAL_ERROR "SEMEL_SANITIZE=${SEMEL_SANITIZE}: use address or thread")
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    target_link_options(semel_options INTERFACE -fuse-ld=lld)
    if(SEMEL_FUZZ)
        target_compile_options(semel_options INTERFACE -fsanitize=fuzzer-no-link)
    endif()
endif()
