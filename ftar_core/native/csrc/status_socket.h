// What operators see of this process's links: one JSON document for whoever connects, then the connection is closed.
//
// An abstract Unix stream socket (unix(7)) called "ftar-links/PID/N" in the network namespace of the process: nothing is
// left behind by SIGKILL, and the agent of a node finds exactly the processes of its node in /proc/net/unix, also those
// in containers that share the host's network, without a directory to share. Any local user of that namespace may read,
// as anybody may with ss(8): there is no secret in it. Nobody can write: what a reader sends is never read.
//
// It must not be in the way of the data that the same thread moves. The document is written in slices of a few links,
// one slice for each turn of the I/O thread, so the transport's lock is held for some 70 us at a time however many links
// there are (500 with two rails each: 2.3 ms of CPU in all); a reader that takes nothing for kStalledMs, or is not done
// after kReaderMs, is dropped. At most kMaxReaders are served at once. Readers of other users give way to the process's
// own user and root, so that nobody can lock out the agent. While nobody asks, it costs a file descriptor.
//
// States are what is now; what happened in between is the list of the last kMaxChanges changes. A NIC that dies takes a
// rail from every connection within milliseconds: the same change of many links is one entry that counts them, as long
// as they come within kMergeMs. A reader takes an entry when it is older than that (`merge_ms`): it is final then.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "link_health.h"

namespace ftar {

class LinkEnd;
class Transport;

class StatusSocket {
 public:
  struct About {
    std::string kind;  // ring | nccl
    std::string job;   // empty: unknown
    std::string name;  // of this process, as its peers know it
  };
  explicit StatusSocket(Transport& transport) : transport_(transport) {}
  StatusSocket(const StatusSocket&) = delete;
  StatusSocket& operator=(const StatusSocket&) = delete;

  // Before the I/O thread starts. A process that may not have such a socket goes on without it.
  void open(About about);
  void close();  // the transport does it, but not in a forked child, where the sockets are closed already

  // All of the following with the transport's lock held.
  void add(const LinkEnd& link);
  void remove(const LinkEnd& link);
  void changed(const LinkEnd& link, const RailChange& change);
  void moved(const LinkEnd& link, int slot, const std::string& reason);
  void dead(const LinkEnd& link, const std::string& reason);  // no rail works; it is not given up yet
  void back(const LinkEnd& link);                             // the contrary, after that
  void unreachable(const LinkEnd& link, const std::string& reason);
  void over(const LinkEnd& link, const std::string& reason);

  // For the transport: ids of its epoll from kFirstId to kLastId are ours.
  static constexpr uint64_t kFirstId = 1u << 10;
  static constexpr uint64_t kLastId = (1u << 11) - 1;
  void on_event(uint64_t id);
  bool busy() const { return !readers_.empty() || listen_again_ms_ > 0; }  // expire() wants to be called
  void expire(double now_ms);

 private:
  struct Entry {
    const LinkEnd* link;
    std::vector<double> detect_ms;  // by slot: how long the last loss took to notice; -1: none, or nothing to notice
  };
  struct Change {
    uint64_t seq = 0;
    double at_ms = 0;
    const char* kind = "";  // rail | moved | dead | back | unreachable | over
    int event = -1;         // RailEvent
    int links = 1;
    std::string peer;       // empty: of several
    const char* direction = "";
    std::string rail;
    const char* from = "";
    const char* to = "";
    std::string reason;
    double detect_ms = -1;
  };
  struct Reader {
    int fd = -1;
    bool stranger = false;  // another user's
    double since_ms = 0;
    double took_ms = 0;  // when it last took something
    std::vector<uint64_t> links;
    size_t next = 0;
    size_t total = 0;
    uint64_t left_out = 0;
    bool first = true;
    bool any_link = false;
    bool last = false;
    std::string out;
    size_t sent = 0;
  };
  static constexpr double kMergeMs = 100;
  static const char* direction(const LinkEnd& link);
  void accept_all();
  void drop(uint64_t id);
  void serve(uint64_t id);
  void write_slice(Reader& reader) const;  // status_document.cpp
  void write_head(std::string& out, const Reader& reader) const;
  void write_link(std::string& out, uint64_t id, const Entry& entry, double now_ms) const;
  void note(const LinkEnd& link, Change change);

  Transport& transport_;
  About about_;
  std::string rank_;
  double opened_ms_ = 0;
  int listener_ = -1;
  double listen_again_ms_ = 0;  // out of file descriptors: accept again then
  std::map<uint64_t, Reader> readers_;  // by epoll id
  uint64_t next_reader_ = 0;
  std::map<uint64_t, Entry> links_;
  std::unordered_map<const LinkEnd*, uint64_t> ids_;
  uint64_t next_link_ = 1;
  std::deque<Change> changes_;
  uint64_t next_seq_ = 1;
};

}  // namespace ftar
