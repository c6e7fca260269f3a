#include "shared_region.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "thread_pool.hpp"

namespace lmcache_fast {
namespace {

constexpr int kMadvPopulateRead = 22;  // Linux 5.14; older C libraries have no name for it
constexpr std::size_t kPopulateStep = std::size_t{2} << 20;

std::size_t page_size() {
    static const auto size = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    return size;
}

std::string checked_name(const std::string& name) {
    const std::string bare = name.compare(0, 1, "/") == 0 ? name.substr(1) : name;
    if (bare.empty() || bare == "." || bare == ".." || bare.find('/') != std::string::npos ||
        bare.find('\0') != std::string::npos) {
        throw std::invalid_argument("SharedRegion: name is '" + name +
                                    "'; expected the name of a segment, without '/' inside");
    }
    return bare;
}

struct Descriptor {
    int number;
    ~Descriptor() {
        if (number >= 0) ::close(number);
    }
    int release() { return std::exchange(number, -1); }
};

}  // namespace

Mapping::~Mapping() {
    ::munmap(address_, size_);
    ::close(file_);
}

bool Mapping::is_intact() const {
    struct stat status{};
    return ::fstat(file_, &status) == 0 && static_cast<std::uint64_t>(status.st_size) >= size_;
}

void Mapping::check_slot(std::uint64_t offset, std::uint64_t length,
                         std::uint64_t alignment) const {
    if (offset > size_ || length > size_ - offset) {
        throw std::invalid_argument("SharedRegion: slot at offset " + std::to_string(offset) +
                                    " with length " + std::to_string(length) +
                                    " lies outside the region of " + std::to_string(size_) +
                                    " bytes");
    }
    if (alignment == 0 || offset % alignment != 0) {
        throw std::invalid_argument("SharedRegion: slot offset " + std::to_string(offset) +
                                    " is no multiple of the alignment " +
                                    std::to_string(alignment));
    }
}

void Mapping::populate(const std::uint64_t* offsets, std::size_t count, std::uint64_t length) {
    struct Range {
        std::byte* begin;
        std::size_t bytes;
    };
    for (std::size_t i = 0; i < count; ++i) check_slot(offsets[i], length);
    if (length == 0) return;
    std::vector<Range> ranges;
    const std::size_t page = page_size();
    {
        // Pages are marked before they are mapped: a second caller may find one missing, and then
        // takes an ordinary page fault.
        const std::lock_guard<std::mutex> lock(mutex_);
        populated_.resize((size_ + page - 1) / page);
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t last = (offsets[i] + length - 1) / page;
            for (std::size_t at = offsets[i] / page; at <= last; ++at) {
                if (populated_[at]) continue;
                populated_[at] = true;
                std::byte* begin = address_ + at * page;
                if (!ranges.empty() && ranges.back().begin + ranges.back().bytes == begin &&
                    ranges.back().bytes < kPopulateStep) {
                    ranges.back().bytes += page;
                } else {
                    ranges.push_back({begin, page});
                }
            }
        }
    }
    if (ranges.empty()) return;
    ThreadPool::instance().run(default_num_threads(), ranges.size(), [&](TaskQueue& queue) {
        for (std::size_t i = 0; queue.take(i);) {
            // Only a hint: a kernel that cannot do it leaves the pages to be faulted in later.
            if (::madvise(ranges[i].begin, ranges[i].bytes, kMadvPopulateRead) != 0) break;
        }
    });
}

SharedRegion::SharedRegion(const std::string& name, std::int64_t size) : name_(checked_name(name)) {
    if (size <= 0) {
        throw std::invalid_argument("SharedRegion: size is " + std::to_string(size) +
                                    "; expected a positive number of bytes");
    }
    const int opened = ::shm_open(("/" + name_).c_str(), O_RDWR | O_CLOEXEC, 0);
    if (opened < 0) {
        throw std::system_error(errno, std::generic_category(),
                                "SharedRegion: cannot open shared memory '" + name_ + "'");
    }
    Descriptor file{opened};
    struct stat status{};
    if (::fstat(file.number, &status) != 0) {
        throw std::system_error(errno, std::generic_category(),
                                "SharedRegion: cannot read the size of '" + name_ + "'");
    }
    if (status.st_size < size) {
        throw std::invalid_argument("SharedRegion: segment '" + name_ + "' has " +
                                    std::to_string(status.st_size) + " bytes; expected at least " +
                                    std::to_string(size));
    }
    const auto bytes = static_cast<std::size_t>(size);
    void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.number, 0);
    if (address == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(),
                                "SharedRegion: cannot map '" + name_ + "'");
    }
    mapping_ = std::make_shared<Mapping>(static_cast<std::byte*>(address), bytes, file.release());
}

const std::shared_ptr<Mapping>& SharedRegion::mapping() const {
    if (!mapping_) {
        throw std::invalid_argument("SharedRegion: '" + name_ + "' is closed");
    }
    return mapping_;
}

}  // namespace lmcache_fast
