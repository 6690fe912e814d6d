#include "lmcache/job_queue.h"

#include <poll.h>

#include <atomic>
#include <chrono>
#include <new>
#include <set>
#include <stdexcept>
#include <thread>

#include "await_job.h"
#include "check.h"
#include "failing_allocation.h"

using namespace lmcache;

namespace {

constexpr double kPatience = 60.0;

struct TestJob : Job<std::vector<int>> {
    int name = 0;
};
using Queue = JobQueue<TestJob>;

std::shared_ptr<TestJob> make_job(std::size_t elements, Lane lane = Lane::kNormal, int name = 0) {
    auto job = std::make_shared<TestJob>();
    job->elements = elements;
    job->lane = lane;
    job->name = name;
    job->results.resize(elements);
    return job;
}

bool is_readable(int fd) {
    pollfd ready{fd, POLLIN, 0};
    return ::poll(&ready, 1, 0) == 1;
}

// What a thread of an owner does: element i has i + 1 as its result.
void work(Queue& queue) {
    Queue::Piece piece;
    while (queue.take(piece)) {
        for (std::size_t i = piece.begin; i < piece.end; ++i) piece.job->results[i] = static_cast<int>(i) + 1;
        queue.ended(*piece.job, piece.end - piece.begin);
    }
}

TEST_CASE(a_job_is_reported_once) {
    Queue queue(8);
    CHECK(!is_readable(queue.event_fd()) && queue.drain().empty());
    const auto first = queue.submit(make_job(1)), second = queue.submit(make_job(2)), empty = queue.submit(make_job(0));
    CHECK(is_readable(queue.event_fd()) && queue.wait(empty, 0)->empty());
    CHECK(!is_readable(queue.event_fd()) && !queue.wait(first, 0));
    queue.start_threads(1, "test", [&queue] { work(queue); });
    CHECK((*queue.wait(second, kPatience) == std::vector<int>{1, 2}));
    CHECK(wait_for(queue, first) == std::vector<int>{1});
    CHECK(!is_readable(queue.event_fd()) && queue.drain().empty());
    for (const auto gone : {first, second, empty, empty + 1}) CHECK(refused([&] { queue.wait(gone, 0); }));
}

TEST_CASE(lanes_have_their_order) {
    Queue queue(8);
    const auto idle = make_job(1, Lane::kIdle, 4);
    queue.submit_idle(idle);
    queue.submit(make_job(2, Lane::kNormal, 2));
    queue.submit(make_job(1, Lane::kNormal, 3));
    queue.submit(make_job(1, Lane::kFirst, 1));
    std::vector<Queue::Piece> pieces(4);
    for (auto& piece : pieces) CHECK(queue.take(piece));
    for (std::size_t i = 0; i < 4; ++i) CHECK(pieces[i].job->name == (std::vector<int>{1, 2, 2, 3})[i]);
    CHECK(pieces[1].begin == 0 && pieces[1].end == 1 && pieces[2].begin == 1 && pieces[2].end == 2);
    // The idle job is taken when no normal one is under way, and not reported.
    for (auto& piece : pieces) queue.ended(*piece.job);
    Queue::Piece piece;
    CHECK(queue.take(piece) && piece.job == idle && queue.ended(*piece.job) && queue.drain().size() == 3);
}

// They wait for normal jobs, but not for ever; very many are not kept.
TEST_CASE(idle_jobs_are_limited) {
    Queue queue(8);
    queue.submit(make_job(1));
    Queue::Piece running, piece;
    CHECK(queue.take(running));
    for (std::size_t i = 0; i <= Queue::kMaxIdleJobs; ++i)
        queue.submit_idle(make_job(1, Lane::kIdle, static_cast<int>(i)));
    std::size_t taken = 0;
    queue.start_threads(1, "test", [&queue, &taken] {
        Queue::Piece idle;
        while (queue.take(idle)) CHECK(idle.job->name == static_cast<int>(++taken) && queue.ended(*idle.job));
    });
    queue.close();
    CHECK(taken == Queue::kMaxIdleJobs - Queue::kPatientIdleJobs);
    queue.ended(*running.job);
    while (queue.take(piece)) ++taken;
    CHECK(taken == Queue::kMaxIdleJobs);
}

TEST_CASE(parties_take_turns_where_a_queue_has_them) {
    Queue queue(16, false, true);
    const auto submit = [&queue](std::uint64_t party, std::size_t elements, int name) {
        const auto job = make_job(elements, Lane::kNormal, name);
        job->party = party;
        queue.submit(job);
    };
    submit(7, 3, 71);
    submit(7, 1, 72);
    submit(~0ULL, 1, 91);
    submit(2, 2, 21);
    std::vector<int> names;
    for (int i = 0; i < 5; ++i) {
        Queue::Piece piece;
        CHECK(queue.take(piece));
        names.push_back(piece.job->name);
        queue.ended(*piece.job);
        if (i == 1) submit(2, 1, 22);  // late, and its party has had its turn
    }
    CHECK((names == std::vector<int>{21, 71, 91, 21, 71}));
    names.clear();
    for (int i = 0; i < 3; ++i) {
        Queue::Piece piece;
        CHECK(queue.take(piece));
        names.push_back(piece.job->name);
        queue.ended(*piece.job);
    }
    CHECK((names == std::vector<int>{22, 71, 72}));
}

TEST_CASE(jobs_are_limited) {
    Queue queue(2);
    const auto first = queue.submit(make_job(0));
    queue.submit(make_job(1));
    CHECK(refused([&] { queue.submit(make_job(1)); }));
    CHECK(queue.wait(first, 0));
    queue.submit(make_job(0));
    queue.close();
    CHECK(refused([&] { queue.submit(make_job(0)); }));
}

// Whichever allocation of a submit fails, the queue is as it was: there is room for others, they are reported, and idle
// jobs have their turn. So many jobs that each structure of the queue grows.
TEST_CASE(a_submit_without_memory_leaves_no_trace) {
    constexpr std::size_t kJobs = 200;
    Queue queue(kJobs);
    std::size_t failures = 0;
    for (std::size_t i = 0; i < kJobs; ++i) {
        const auto job = make_job(i % 2);
        for (int allocation = 1;; ++allocation, ++failures)
            if (!fails_at_allocation(allocation, [&] { queue.submit(job); })) break;
    }
    CHECK(failures == 0 || failures > kJobs);
    Queue::Piece piece;
    queue.submit_idle(make_job(1, Lane::kIdle));
    for (std::size_t i = 0; i < kJobs / 2; ++i) CHECK(queue.take(piece) && queue.ended(*piece.job));
    CHECK(queue.take(piece) && piece.job->lane == Lane::kIdle && queue.drain().size() == kJobs);
}

// What is called when a job is accepted may fail as well.
TEST_CASE(a_job_whose_acceptance_fails_is_not_taken) {
    Queue queue(1);
    for (const std::size_t elements : {0, 1})
        CHECK(refused<std::bad_alloc>([&] { queue.submit(make_job(elements), [] { throw std::bad_alloc(); }); }));
    const auto job = queue.submit(make_job(1, Lane::kNormal, 7));
    Queue::Piece piece;
    CHECK(queue.take(piece) && piece.job->name == 7 && queue.ended(*piece.job) && queue.wait(job, 0));
}

TEST_CASE(a_polled_queue_leaves_normal_jobs_to_the_poller) {
    Queue queue(8, true);
    Queue::Piece piece;
    CHECK(queue.poll(piece) == Taken::kNothing);
    const auto normal = queue.submit(make_job(1));
    CHECK(is_readable(queue.wake().get()));
    queue.start_threads(2, "test", [&queue] { work(queue); });
    wait_for(queue, queue.submit(make_job(1, Lane::kFirst)));
    queue.wake().reset();
    CHECK(queue.poll(piece) == Taken::kPiece && piece.job->lane == Lane::kNormal);
    queue.ended(*piece.job);
    CHECK(queue.wait(normal, 0));
    queue.close();
    CHECK(queue.poll(piece) == Taken::kEnd && is_readable(queue.wake().get()));
}

// Its threads sleep then; the poller, which ends the last normal job, takes no idle ones.
TEST_CASE(a_polled_queue_wakes_a_thread_for_idle_jobs) {
    std::atomic<int> idle_jobs{0};
    Queue queue(8, true);
    queue.start_threads(1, "test", [&queue, &idle_jobs] {
        Queue::Piece piece;
        while (queue.take(piece)) {
            queue.ended(*piece.job);
            if (piece.job->lane == Lane::kIdle) ++idle_jobs;
        }
    });
    for (int round = 1; round <= 20; ++round) {
        wait_for(queue, queue.submit(make_job(1, Lane::kFirst)));
        queue.submit(make_job(1));
        Queue::Piece normal;
        CHECK(queue.poll(normal) == Taken::kPiece);
        queue.submit_idle(make_job(1, Lane::kIdle));
        queue.ended(*normal.job);
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
        while (idle_jobs != round && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
        CHECK(idle_jobs == round);
    }
}

TEST_CASE(closing_ends_everything) {
    Queue queue(1000);
    std::set<std::uint64_t> jobs;
    for (int i = 0; i < 100; ++i) jobs.insert(queue.submit(make_job(5)));
    queue.start_threads(3, "test", [&queue] { work(queue); });
    queue.close();
    queue.close();
    const auto completions = queue.drain();
    CHECK(completions.size() == jobs.size());
    for (const auto& [job, results] : completions) CHECK(jobs.erase(job) == 1 && results.back() == 5);
}

TEST_CASE(many_threads_submit_and_wait) {
    Queue queue(1000);
    queue.start_threads(3, "test", [&queue] { work(queue); });
    std::vector<std::jthread> users;
    for (int user = 0; user < 4; ++user)
        users.emplace_back([&queue, user] {
            for (std::size_t round = 1; round < 200; ++round) {
                const auto job = queue.submit(make_job(round % 7, user % 2 == 0 ? Lane::kFirst : Lane::kNormal));
                CHECK(queue.wait(job, kPatience)->size() == round % 7);
            }
        });
}

}  // namespace
