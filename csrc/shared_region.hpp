// A POSIX shared memory segment that somebody else owns, mapped once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lmcache_fast {

/// The pages themselves. They stay mapped while anything holds this.
class Mapping {
  public:
    /// Takes over `file`, an open descriptor of what is mapped.
    Mapping(std::byte* address, std::size_t size, int file)
        : address_(address), size_(size), file_(file) {}
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::byte* address() const { return address_; }
    std::size_t size() const { return size_; }

    /// Whether the file is still as long as what is mapped: touching what is missing is SIGBUS.
    bool is_intact() const;

    /// Throws std::invalid_argument unless [offset, offset + length) lies inside and is aligned.
    void check_slot(std::uint64_t offset, std::uint64_t length, std::uint64_t alignment = 1) const;

    /// Maps the pages of these slots before their first use, on all threads; each page once.
    void populate(const std::uint64_t* offsets, std::size_t count, std::uint64_t length);

  private:
    std::byte* address_;
    std::size_t size_;
    int file_;
    std::mutex mutex_;
    std::vector<bool> populated_;  // one a page
};

/// An open segment. Closing drops our hold on the mapping; it never unlinks.
class SharedRegion {
  public:
    /// Throws std::system_error where the segment cannot be opened, std::invalid_argument where it
    /// is shorter than `size` (touching what is missing would be SIGBUS).
    SharedRegion(const std::string& name, std::int64_t size);

    const std::string& name() const { return name_; }
    void close() { mapping_.reset(); }
    /// Throws std::invalid_argument after close().
    const std::shared_ptr<Mapping>& mapping() const;

  private:
    std::string name_;
    std::shared_ptr<Mapping> mapping_;
};

}  // namespace lmcache_fast
