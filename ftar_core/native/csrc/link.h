// A reliable, ordered, message-preserving channel to one peer over several rails.
//
// Data goes one way, acknowledgements come back. All rails are connected when the link is made. Every connection can carry
// any part of any message (frame.h); the mode only says which rails do: in "backup" the UP rail of the lowest index, in
// "stripe" every UP rail, each as much as it is fast (stripe.h). Connections pull: one that can take more asks for the
// next part, so moving from one live connection to another needs neither a word nor a wait.
//
// A message is complete at the sender when the receiver has all its bytes. Until then the caller's memory is the copy to
// send again, so nothing is copied on the way out. The receiver writes straight to the destination that its user names.
// When a connection is lost, whoever noticed, the sender goes on at once with new data on the others and asks what had
// come on the lost one (`lost`); the receiver first closes its end, so that no late byte can land in a buffer that was
// handed back, then answers (`have`), and exactly the missing bytes go out again. The books are pure: outbox.h, inbox.h.
// Rejected: a stop until a new rail is agreed on (`change` and `resume`, wire version 1). It costs a round trip in which
// nothing moves, and needs a second mechanism for striping.
//
// Either end may notice a dead rail first; it tells the other over the rails that live (`notice`), because behind a
// switch the far end keeps its carrier.
//
// The end of the peer's process: its kernel closes every connection. But a kernel also resets what its process closed
// itself while no rail worked, so that alone is no proof; then this end asks, over every rail, whether anybody listens.
// "Refused" is proof, an answer is the contrary, and silence is the network's: that is reported as unreachable.
// A link that was never made asks for more: a firewall may refuse too, so every rail has to, several times in a row.
//
// Addresses may change while a rail is away. Connections of an address that is gone are dropped, the sender dials from
// the new one, and a receiver whose address moved says so over the rails that live (`endpoint`), at once and on every
// new connection.
//
// Users: the ring (ring.h), and whatever else needs such a channel: a sender gives messages in order, a receiver gives
// places by what the message is. A posting-order API (isend, irecv, test) is a queue of places on top of this.
#pragma once
#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "inbox.h"
#include "link_health.h"
#include "outbox.h"
#include "stripe.h"
#include "transport.h"

namespace ftar {

class LinkEnd;

class LinkOwner {
 public:
  virtual ~LinkOwner() = default;
  virtual void link_ready(LinkEnd& link) = 0;
  virtual void link_rail(LinkEnd& link, const RailChange& change) = 0;
  virtual void link_moved(LinkEnd& link, int slot, const std::string& reason) = 0;  // this rail carries data from now on
  // What a person should look after although the link goes on. The same is not said again until it was over.
  virtual void link_warns(LinkEnd&, int, const std::string&) {}
  virtual void link_unreachable(LinkEnd& link, const std::string& reason) = 0;
  // The link is over and closed. left_epoch: the peer's process lives on, but without this link.
  virtual void link_over(LinkEnd& link, const std::string& reason, bool left_epoch) = 0;
};

struct LinkRail {
  int local = 0;        // index of the transport's rail
  std::string name;     // the sender's name for it: what a Hello says
  Address remote;       // where the peer listens, TCP and UDP
};

struct LinkName {
  std::string epoch;
  std::string from;
  std::string to;
  uint64_t from_incarnation = 0;
  uint64_t to_incarnation = 0;
  std::string key = {};  // the receiver's, that a sender must prove; empty: the transport's own
};

struct LinkRailStat {
  RailVerdict verdict;
  bool active = false;  // carries data
  uint64_t bytes = 0;
  double silent_ms = 0;  // LinkHealth::silent_ms
};

// What both ends share: connections by rail, health, heartbeats (link_beat.cpp), addresses (link_address.cpp), the end
// of the peer.
class LinkEnd : public ConnUser, public PathUser {
 public:
  LinkEnd(Transport& transport, LinkOwner& owner, LinkName name, std::vector<LinkRail> rails, bool sender);
  ~LinkEnd() override;
  LinkEnd(const LinkEnd&) = delete;
  LinkEnd& operator=(const LinkEnd&) = delete;

  void tick(double now_ms);
  void progress();  // move in this thread what can be moved; for a caller that waits in a loop
  // Without the lock: somebody asks in a loop whether something is done (and calls progress). As long as that goes on the
  // I/O thread is not woken for the connection that carries the data; when a tick finds that it has ended, it is again.
  void asked() {
    if (!asked_.load(std::memory_order_relaxed)) asked_.store(true, std::memory_order_relaxed);
  }
  void add_open(std::vector<Conn*>* out) const;
  // Ends the link here; the peer is told why. No memory of the caller is touched afterwards.
  void close(const std::string& reason, bool left_epoch);

  bool sender() const { return sender_; }
  bool closed() const { return closed_; }
  bool ready() const { return ready_; }
  const std::string& peer() const { return sender_ ? name_.to : name_.from; }
  const std::vector<LinkRail>& rails() const { return rails_; }
  bool carries(int slot) const { return (carrying_ >> slot & 1) != 0; }
  int resumes() const { return resumes_; }
  const std::string& rail_name(int slot) const;
  LinkRailStat stat(int slot, double now_ms) const;
  std::string mtu_difference(int slot) const;  // see netio.h
  int retransmits(int slot) const;  // by the present connection's TCP; 0 without one

  void conn_open(Conn& conn) override;
  void conn_parked(Conn&) override {}
  void conn_heard(Conn& conn) override;
  const char* control(Conn& conn, const FrameHeader& header, std::string_view text) override;
  void conn_closed(Conn& conn, const std::string& reason, ConnEnd end) override;
  Path* path_on(int rail) const override;
  bool misses(int rail) const override;
  void path_heard(int slot, uint64_t echo, double now_ms) override;
  void own_echo(int rail, uint64_t ping, double now_ms) override;
  void missing_there(int slot, uint64_t ping, double asked_ms, double now_ms) override;
  void said_goodbye(uint64_t complete, uint8_t flags) override;

 protected:
  virtual void rails_changed(double now_ms) = 0;  // health has news; the connections of dead rails are closed
  virtual void conn_attached(int) {}              // open; the first word on it is ours
  virtual void conn_gone(int) {}                  // closed, whatever the reason
  virtual void tick_more(double now_ms) = 0;
  virtual void ended() {}                         // nothing comes any more
  virtual const char* own_control(Conn& conn, const FrameHeader& header) = 0;
  // A goodbye is the last word: it also says how many messages are complete, or one whose acknowledgement was lost
  // with a rail would count as lost.
  virtual uint64_t complete_messages() const { return 0; }
  virtual void peer_completed(uint64_t) {}
  Conn* open_conn(int slot) const;
  FrameHeader header(FrameType type) const;
  void settle(double now_ms);  // act on what health decided
  void drop_conn(int slot);
  void flush_all();
  void over(const std::string& reason, bool left_epoch);
  void attached(Conn& conn, double now_ms);
  const SizeTest& sizes(int slot) const { return per_rail_[static_cast<size_t>(slot)].sizes; }
  void forget_sizes(int slot) { per_rail_[static_cast<size_t>(slot)].sizes = {}; }
  void test_size(int slot, size_t bytes, double now_ms);
  void prove_with(int slot, size_t bytes) { per_rail_[static_cast<size_t>(slot)].proof_bytes = bytes; }
  void unreachable(const std::string& reason);

  Transport& transport_;
  LinkOwner& owner_;
  const LinkName name_;
  const std::string key_;
  std::vector<LinkRail> rails_;
  const bool sender_;
  uint64_t tag_ = 0;
  LinkHealth health_;
  std::vector<Conn*> conns_;  // by slot: connecting or open
  uint64_t carrying_ = 0;  // a bit for every rail that carries data, as far as this end knows
  int resumes_ = 0;
  bool closed_ = false;
  double started_ms_;

 private:
  struct PerRail {
    bool opened = false;      // the connection in conns_ finished its handshake
    Conn* inquiry = nullptr;  // does anybody listen there?
    Path* path = nullptr;     // while the connection is open
    uint64_t first_ping = 0;  // pings from here on belong to the present connection
    double next_proof_ms = 0;
    double opened_ms = 0;
    uint64_t bytes_before = 0;
    unsigned addresses = 0;   // the version of the port's addresses that was acted upon
    SizeTest sizes;           // while TCP seems stuck
    size_t proof_bytes = 0;   // of pings that are to prove the rail, after small packets passed and large ones did not
    int refusals = 0;  // attempts in a row at which nobody listened there
  };
  int slot_on(int rail) const;
  void join_path(int slot, double now_ms);
  void leave_path(int slot);
  void prove(int slot, double now_ms);
  void addresses_changed(int slot, double now_ms);
  void tell_endpoints(Conn& conn);
  const char* endpoint(const FrameHeader& header, const std::string& host);
  const RailPort& port(size_t slot) const { return transport_.ports()[static_cast<size_t>(rails_[slot].local)]; }
  void lend();
  void check_ready(double now_ms);
  void inquire(double now_ms);
  void drop_inquiries();
  bool any_open() const;
  bool nobody_listens() const;
  void check_dead(double now_ms);

  std::vector<PerRail> per_rail_;
  std::atomic<bool> asked_{false};  // since the last tick
  bool lent_ = false;
  bool ready_ = false;
  bool settling_ = false;
  double first_up_ms_ = -1;
  double inquire_at_ms_ = -1;  // the peer's kernel closed everything: ask whether the process still lives
  std::string closed_reason_;
  bool unreachable_told_ = false;
  bool dead_told_ = false;
};

class SendLink final : public LinkEnd {
 public:
  using Complete = std::function<void(const OutMessage&)>;  // the receiver has all of it
  SendLink(Transport& transport, LinkOwner& owner, LinkName name, std::vector<LinkRail> rails, Complete complete);

  void send(OutMessage message);  // in order; pump() to get it going
  void pump(bool now);            // now: in this thread

  void data_arrived(Conn&, size_t) override {}
  void data_complete(Conn&, const FrameHeader&) override {}
  Placement data_begins(Conn& conn, const FrameHeader& header) override;
  void batch_done(Conn& conn) override;
  bool next_frame(Conn& conn, FrameHeader* header, const std::byte** payload) override;

 private:
  void rails_changed(double now_ms) override;
  void tick_more(double now_ms) override;
  void conn_attached(int slot) override;
  void conn_gone(int slot) override;
  const char* own_control(Conn& conn, const FrameHeader& header) override;
  void peer_completed(uint64_t seq) override;
  void ask(Conn& conn, const Outbox::Question& question);
  void acknowledged(uint64_t seq);
  uint64_t chosen(double now_ms) const;  // the rails that should carry data
  void choose(double now_ms);
  void flush_carrying();
  uint64_t share(const Conn& conn);  // how much the scheduler gives this connection
  void measure();
  void check_stalled(double now_ms);
  void check_stalled(int slot, double now_ms);

  Complete complete_;
  Outbox box_;
  uint64_t lost_carriers_ = 0;  // carried data when their connection went, since the last choice
  bool ever_carried_ = false;
  const bool stripe_;
  std::vector<RateMeter> meters_;  // by rail, in stripe mode
  std::vector<RailLoad> loads_;    // of the carrying rails, only valid in share()
  uint64_t declined_ = 0;          // a bit for every rail that left a piece to others since the last measuring
  double next_measure_ms_ = 0;
  double next_stall_check_ms_ = 0;
  double stalled_since_ms_ = -1;  // since then TCP has stalled again and again, and no message became complete
  double last_stall_ms_ = -1e18;
  std::vector<double> in_flight_since_ms_;  // by rail: every look since then found segments on their way
};

class RecvLink final : public LinkEnd {
 public:
  RecvLink(Transport& transport, LinkOwner& owner, LinkName name, std::vector<LinkRail> rails, RecvSink& sink);

  int slot_of(const std::string& rail) const;  // -1: no such rail
  void attach(Conn& conn, int slot);           // an accepted connection that proved to be this link's sender
  void places_changed(bool now);               // `place` may answer otherwise; now: read in this thread
  bool waits() const { return inbox_.waits(); }  // messages came before their place

  Placement data_begins(Conn& conn, const FrameHeader& header) override;
  void data_arrived(Conn& conn, size_t bytes) override { inbox_.arrived(conn.slot(), bytes); }
  void data_complete(Conn& conn, const FrameHeader& header) override;
  void batch_done(Conn& conn) override;
  bool next_frame(Conn&, FrameHeader*, const std::byte**) override { return false; }

 private:
  void rails_changed(double) override { flush_all(); }
  void tick_more(double now_ms) override;
  void conn_gone(int slot) override;
  const char* own_control(Conn& conn, const FrameHeader& header) override;
  uint64_t complete_messages() const override { return inbox_.next_seq(); }
  const char* lost(Conn& conn, const FrameHeader& header);
  const char* carry(const FrameHeader& header);
  void deliver();
  void acknowledge();
  void ended() override { inbox_.give_up(); }
  void make_room(double now_ms);
  void kick_paused(bool now);

  RecvSink& sink_;
  Inbox inbox_;
  int last_slot_ = -1;       // where data came last
  bool ever_carried_ = false;
  uint64_t acked_seq_ = 0;
  uint64_t unacked_bytes_ = 0;
  bool ack_soon_ = false;
  double stuck_since_ms_ = -1;
};

}  // namespace ftar
