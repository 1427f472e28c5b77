#include "onnx_kv/ops/memory/pool.h"

#include <algorithm>
#include <chrono>

namespace onnx_kv::memory {
namespace {

// The windows that a span touches: [first, last).
struct Windows {
  uint64_t first;
  uint64_t last;
};

Windows Touched(const Span& span, uint64_t granule) {
  if (span.bytes == 0) return {0, 0};
  return {span.offset / granule, (span.offset + span.bytes - 1) / granule + 1};
}

Windows Within(const Span& span, uint64_t granule) {
  return {(span.offset + granule - 1) / granule, (span.offset + span.bytes) / granule};
}

class Timer {
 public:
  explicit Timer(uint64_t& total) : total_(total) {}
  ~Timer() {
    total_ += static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_).count());
  }

 private:
  uint64_t& total_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

Reservation::Reservation(std::shared_ptr<Pool> owner, uint64_t size) : pool(std::move(owner)) {
  const uint64_t granule = pool->backend_->granule();
  if (size == 0 || size > INT64_MAX - granule) {
    throw Error(ONNX_KV_INVALID_ARGUMENT, "cannot reserve " + std::to_string(size) + " bytes of address space");
  }
  bytes = (size + granule - 1) / granule * granule;
  address = pool->Reserve(bytes);
}

Reservation::~Reservation() { Close(); }

uint64_t Reservation::Close() {
  if (address == 0) return 0;
  const uint64_t freed = pool->Free(*this);
  address = 0;
  return freed;
}

class Pool::Mapping {
 public:
  explicit Mapping(Pool& pool) : pool_(pool), timer_(pool.counters_.map_ns) {}

  ~Mapping() {
    if (kept_) return;
    for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) Undo(*entry);
  }

  // Backs a window with an idle granule, or with a new one.
  void Fill(Reservation& reservation, uint64_t window) {
    Entry& entry = entries_.emplace_back(Entry{&reservation, window});
    entry.created = pool_.idle_.empty();
    if (entry.created) {
      auto granule = std::make_unique<Granule>();
      pool_.idle_.reserve(pool_.counters_.physical_bytes / pool_.backend_->granule() + 1);  // so Undo never allocates
      granule->handle = pool_.backend_->Create();
      entry.granule = granule.release();
      pool_.counters_.physical_bytes += pool_.backend_->granule();
      ++pool_.counters_.creates;
    } else {
      entry.granule = pool_.idle_.back();
      pool_.idle_.pop_back();
    }
    Map(entry);
  }

  // Maps a granule that is mapped elsewhere already.
  void Add(Reservation& reservation, uint64_t window, Granule* granule) {
    Entry& entry = entries_.emplace_back(Entry{&reservation, window});
    entry.granule = granule;
    Map(entry);
  }

  // Makes the new windows accessible, range by range, and lets them stand. Returns their number.
  uint64_t Keep() {
    const uint64_t granule = pool_.backend_->granule();
    for (size_t first = 0; first < entries_.size();) {
      size_t next = first + 1;
      while (next < entries_.size() && entries_[next].reservation == entries_[first].reservation &&
             entries_[next].window == entries_[next - 1].window + 1) {
        ++next;
      }
      const uint64_t address = entries_[first].reservation->address + entries_[first].window * granule;
      pool_.backend_->SetAccess(address, (next - first) * granule);
      first = next;
    }
    kept_ = true;
    return entries_.size();
  }

 private:
  struct Entry {
    Reservation* reservation;
    uint64_t window;
    Granule* granule = nullptr;
    bool created = false;
    bool mapped = false;
  };

  void Map(Entry& entry) {
    entry.reservation->windows.emplace(entry.window, entry.granule);
    ++entry.granule->mappings;
    pool_.backend_->Map(entry.reservation->address + entry.window * pool_.backend_->granule(), entry.granule->handle);
    entry.mapped = true;
    ++pool_.counters_.maps;
  }

  void Undo(const Entry& entry) {
    if (entry.granule == nullptr) return;
    try {
      if (entry.mapped) {
        pool_.backend_->Unmap(entry.reservation->address + entry.window * pool_.backend_->granule());
        ++pool_.counters_.unmaps;
      }
    } catch (const Error&) {
      return;  // the window is backed, and the books say so
    }
    if (entry.reservation->windows.erase(entry.window) != 0) --entry.granule->mappings;
    if (entry.granule->mappings != 0) return;
    pool_.idle_.push_back(entry.granule);
    if (!entry.created) return;
    try {
      pool_.Destroy(entry.granule);
      pool_.idle_.pop_back();
    } catch (const Error&) {
      return;  // it stays idle
    }
  }

  Pool& pool_;
  Timer timer_;
  std::vector<Entry> entries_;
  bool kept_ = false;
};

Pool::Pool(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {
  counters_.granule_bytes = backend_->granule();
}

Pool::~Pool() {
  try {
    Trim(0);
  } catch (const Error&) {
    return;  // the driver takes back what is left when the process ends
  }
}

uint64_t Pool::Missing(std::span<const Span> spans) {
  std::lock_guard lock(mutex_);
  uint64_t missing = 0;
  // Spans are in ascending order for each reservation, so a window that two of them touch is the last of the first.
  const Span* previous = nullptr;
  uint64_t counted = 0;
  for (const Span& span : spans) {
    CheckSpan(span);
    const Windows touched = Touched(span, backend_->granule());
    if (previous == nullptr || previous->reservation != span.reservation) counted = 0;
    for (uint64_t window = std::max(touched.first, counted); window < touched.last; ++window) {
      missing += span.reservation->windows.count(window) == 0;
    }
    counted = std::max(counted, touched.last);
    previous = &span;
  }
  return missing;
}

uint64_t Pool::Commit(std::span<const Span> spans) {
  std::lock_guard lock(mutex_);
  Mapping mapping(*this);
  for (const Span& span : spans) {
    CheckSpan(span);
    const Windows touched = Touched(span, backend_->granule());
    for (uint64_t window = touched.first; window < touched.last; ++window) {
      if (span.reservation->windows.count(window) == 0) mapping.Fill(*span.reservation, window);
    }
  }
  return mapping.Keep();
}

Released Pool::Decommit(std::span<const Span> spans) {
  std::lock_guard lock(mutex_);
  const uint64_t granule = backend_->granule();
  struct Unmapped {
    Reservation* reservation;
    std::map<uint64_t, Granule*>::node_type window;
    uint64_t address;
  };
  std::vector<Unmapped> unmapped;
  const auto release = [&](Granule* released) {
    if (--released->mappings != 0) return false;
    idle_.push_back(released);
    return true;
  };
  try {
    for (const Span& span : spans) {
      CheckSpan(span);
      const Windows within = Within(span, granule);
      auto& windows = span.reservation->windows;
      for (auto it = windows.lower_bound(within.first); it != windows.end() && it->first < within.last;) {
        const uint64_t address = span.reservation->address + it->first * granule;
        Unmapped& entry = unmapped.emplace_back();
        backend_->Unmap(address);
        entry = {span.reservation, windows.extract(it++), address};
      }
    }
  } catch (...) {
    for (Unmapped& entry : unmapped) {
      if (entry.window.empty()) continue;  // the one that failed
      try {
        backend_->Map(entry.address, entry.window.mapped()->handle);
        backend_->SetAccess(entry.address, granule);
        entry.reservation->windows.insert(std::move(entry.window));
      } catch (const Error&) {
        release(entry.window.mapped());  // it held nothing that the caller wants
      }
    }
    throw;
  }
  Released released;
  for (const Unmapped& entry : unmapped) {
    ++released.unmapped;
    released.freed += release(entry.window.mapped());
  }
  counters_.unmaps += released.unmapped;
  return released;
}

void Pool::Map(std::span<const Share> shares) {
  std::lock_guard lock(mutex_);
  const uint64_t granule = backend_->granule();
  Mapping mapping(*this);
  for (const Share& share : shares) {
    CheckSpan(share.source);
    CheckSpan(share.target);
    if (share.source.offset % granule != 0 || share.target.offset % granule != 0 || share.source.bytes % granule != 0 ||
        share.source.bytes != share.target.bytes) {
      throw Error(ONNX_KV_INVALID_ARGUMENT, "granules are shared whole: offsets and sizes must be multiples of " +
                                                std::to_string(granule) + " bytes");
    }
    for (uint64_t i = 0; i < share.source.bytes / granule; ++i) {
      const auto source = share.source.reservation->windows.find(share.source.offset / granule + i);
      const uint64_t target = share.target.offset / granule + i;
      if (source == share.source.reservation->windows.end()) {
        throw Error(ONNX_KV_INVALID_ARGUMENT, "cannot share memory that is not committed");
      }
      if (share.target.reservation->windows.count(target) != 0) {
        throw Error(ONNX_KV_INVALID_ARGUMENT, "cannot map shared memory over committed memory; decommit it first");
      }
      mapping.Add(*share.target.reservation, target, source->second);
    }
  }
  mapping.Keep();
}

uint64_t Pool::Shared(const Span& span) {
  std::lock_guard lock(mutex_);
  CheckSpan(span);
  const Windows touched = Touched(span, backend_->granule());
  const auto& windows = span.reservation->windows;
  return static_cast<uint64_t>(std::count_if(windows.lower_bound(touched.first), windows.lower_bound(touched.last),
                                             [](const auto& entry) { return entry.second->mappings > 1; }));
}

uint64_t Pool::Trim(uint64_t keep) {
  std::lock_guard lock(mutex_);
  uint64_t given_back = 0;
  while (idle_.size() * backend_->granule() > keep) {
    Destroy(idle_.back());
    idle_.pop_back();
    given_back += backend_->granule();
  }
  return given_back;
}

OnnxKvMemoryCounters Pool::counters() {
  std::lock_guard lock(mutex_);
  counters_.idle_bytes = idle_.size() * backend_->granule();
  return counters_;
}

void Pool::FailAfter(int64_t calls) {
  std::lock_guard lock(mutex_);
  backend_->FailAfter(calls);
}

uint64_t Pool::Reserve(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  const uint64_t address = backend_->Reserve(bytes);
  counters_.reserved_bytes += bytes;
  return address;
}

uint64_t Pool::Free(Reservation& reservation) noexcept {
  std::lock_guard lock(mutex_);
  uint64_t freed = 0;
  try {
    if (!reservation.windows.empty()) backend_->Quiesce();  // a reservation may be dropped with its last reference, by no one who has waited
  } catch (const Error&) {
    // Work that failed touches nothing any more.
  }
  for (const auto& [window, granule] : reservation.windows) {
    try {
      backend_->Unmap(reservation.address + window * backend_->granule());
      ++counters_.unmaps;
    } catch (const Error&) {
      // The address is never used again, so a mapping left there harms nobody.
    }
    if (--granule->mappings != 0) continue;
    idle_.push_back(granule);
    ++freed;
  }
  reservation.windows.clear();
  counters_.reserved_bytes -= reservation.bytes;
  try {
    backend_->Free(reservation.address, reservation.bytes);
  } catch (const Error&) {
    // Address space is lost, not memory.
  }
  return freed;
}

// Gives a granule back to the driver; the caller takes it off the idle list.
void Pool::Destroy(Granule* granule) {
  backend_->Destroy(granule->handle);
  counters_.physical_bytes -= backend_->granule();
  delete granule;
}

void Pool::CheckSpan(const Span& span) const {
  if (span.reservation->pool.get() != this) {
    throw Error(ONNX_KV_INVALID_ARGUMENT, "the reservations of one operation must come from one pool");
  }
  if (span.offset > span.reservation->bytes || span.bytes > span.reservation->bytes - span.offset) {
    throw Error(ONNX_KV_INVALID_ARGUMENT,
                "bytes " + std::to_string(span.offset) + " to " + std::to_string(span.offset + span.bytes) +
                    " are outside a reservation of " + std::to_string(span.reservation->bytes));
  }
}

}  // namespace onnx_kv::memory
