#include "ring/link.h"

#include <cstdlib>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "annulus/error.h"
#include "annulus/events.h"
#include "ring/agreement.h"
#include "ring/message_events.h"

namespace annulus::ring {

void Batch::add(Way way, int peer, std::uint32_t tag, const Mailbox& box, std::int64_t offset,
                std::int64_t bytes) {
  messages.push_back({way, peer, tag, &box.region, offset, bytes});
  boxes.push_back(&box);
}

Link::Link(Transport& transport, Backend& backend, std::shared_ptr<Queue> queue)
    : transport_(&transport),
      backend_(&backend),
      queue_(std::move(queue)),
      copies_(backend.immediate() ? nullptr : backend.make_queue()),
      staged_(!backend.immediate() && !transport.reaches(backend.device())) {}

void Link::connect() {
  if (transport_->size() == 1) return;
  way_ = backend_->immediate() ? "host memory" : "device memory";
  if (!staged_) return;
  const char* variable = std::getenv("ANNULUS_DEVICE_MESSAGES");
  const std::string_view wanted = variable == nullptr ? "" : variable;
  std::string complaint;
  if (wanted == "group") {
    complaint = fmt::format(
        "ANNULUS_DEVICE_MESSAGES is group, but the transport ({}) does not reach device memory",
        transport_->name());
  } else if (!wanted.empty() && wanted != "shared" && wanted != "staged") {
    complaint =
        fmt::format("ANNULUS_DEVICE_MESSAGES is '{}', expected shared, staged or group", wanted);
  }
  const Claim claim{"ANNULUS_DEVICE_MESSAGES", std::string(wanted)};
  agree(*transport_, "RingAttention", complaint, std::span(&claim, 1));
  std::string why = "ANNULUS_DEVICE_MESSAGES is staged";
  if (wanted != "staged") {
    try {
      sharing_ = backend_->sharing();
      shared_ = share_device_memory(*transport_, sharing_, why);
    } catch (const std::exception& error) {
      transport_->abort(error.what());  // the other ranks would wait for this rank's record
      throw;
    }
  }
  staged_ = shared_ == nullptr;
  way_ = staged_ ? fmt::format("staged through host memory ({})", why) : "shared device memory";
  if (staged_ && wanted == "shared") {
    throw ConfigError(
        prefix(*transport_, "RingAttention") +
        "ANNULUS_DEVICE_MESSAGES is shared, but processes cannot share device memory: " + why);
  }
}

void Link::check() const {
  if (shared_ != nullptr) shared_->check();
}

Mailbox Link::make_mailbox(std::int64_t bytes, const char* what) {
  Mailbox box;
  box.memory =
      shared_ != nullptr ? sharing_->allocate(bytes, what) : backend_->allocate(bytes, what);
  if (staged_) box.staging = backend_->allocate_staging(bytes, what);
  box.region = staged_ ? transport_->expose(box.staging.span(), Device{}, nullptr)
                       : carrier().expose(box.memory.span(), box.memory.device(), copies_);
  return box;
}

Posted Link::post(const Batch& batch, const Event& after) {
  if (batch.messages.empty()) return {};
  const std::int64_t begin = event_stream().on() ? EventStream::now_ns() : 0;
  if (!staged_) return {carrier().post(batch.messages, after), begin};
  copies_->wait(after);
  for (std::size_t i = 0; i < batch.messages.size(); ++i) {
    const Message& message = batch.messages[i];
    const Mailbox& box = *batch.boxes[i];
    if (message.way == Way::receive || message.bytes == 0) continue;
    copies_->copy(box.staging.data() + message.offset, box.data() + message.offset, message.bytes);
  }
  // The host waits for the device before it posts the messages.
  const EventScope waiting(EventKind::wait, "device", transport_->rank(), batch.step);
  return {transport_->post(batch.messages, copies_->record()), begin};
}

void Link::wait(const Batch& batch, Posted& posted) {
  if (posted.ticket == nullptr) return;
  {
    const EventScope waiting(EventKind::wait, batch.what, transport_->rank(), batch.step);
    wait_for(batch, *posted.ticket);
  }
  posted.reset();
  if (posted.begin_ns != 0)
    record_messages(*transport_, batch.messages, batch.what, batch.step, posted.begin_ns);
}

void Link::wait_for(const Batch& batch, Ticket& ticket) {
  if (!staged_) {
    ticket.wait(*queue_);
    return;
  }
  ticket.wait();
  for (std::size_t i = 0; i < batch.messages.size(); ++i) {
    const Message& message = batch.messages[i];
    const Mailbox& box = *batch.boxes[i];
    if (message.way == Way::send || message.bytes == 0) continue;
    copies_->copy(box.data() + message.offset, box.staging.data() + message.offset, message.bytes);
  }
  queue_->wait(copies_->record());
}

void Link::use_queue(std::shared_ptr<Queue> queue) {
  queue->follow(*queue_);
  queue_ = std::move(queue);
}

void Link::finish() {
  queue_->record().wait();
  // Staging copies of a batch that could not be posted may still run.
  if (copies_ != nullptr) copies_->record().wait();
}

}  // namespace annulus::ring
