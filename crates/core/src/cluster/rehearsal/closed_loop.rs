//! Clients that ask again once they were answered.

use std::collections::VecDeque;

use super::noise::{Random, Ring};
use crate::time::{Duration, Time};

/// Arrivals after which it is judged anew whether they come from such clients.
const ROUND: u32 = 1024;
/// More of them are taken for a load that waits for nobody.
const MOST: u32 = 256;

/// Whether a model's requests come from so many clients that each waits for its answer before it asks again (a closed loop): then what is decided
/// changes when they come, and larger batches bring more of them. A benchmark does so, and a job that works through a list.
///
/// The sign of it is a ceiling: again and again as many requests are under way as never more, while none is lost and clients
/// spend less than half of their time on anything but waiting. Requests that wait for nobody reach their most once in thousands.
#[derive(Clone, Debug, Default)]
pub(super) struct ClosedLoop {
    under_way: u32,
    /// The most that were under way in this round, and how often.
    most: u32,
    hits: u32,
    arrivals: u32,
    lost: bool,
    began: Time,
    /// When requests were answered whose clients have not asked again, the oldest first.
    answered: VecDeque<Time>,
    /// What clients took between an answer and their next request, seconds.
    pauses: Ring,
    clients: Option<u32>,
}

impl ClosedLoop {
    /// A request came.
    pub fn arrived(&mut self, at: Time) {
        self.under_way = self.under_way.saturating_add(1);
        match self.under_way.cmp(&self.most) {
            std::cmp::Ordering::Greater => (self.most, self.hits) = (self.under_way, 1),
            std::cmp::Ordering::Equal => self.hits += 1,
            std::cmp::Ordering::Less => {}
        }
        if let Some(answered) = self.answered.pop_front() {
            self.pauses.add(at.since(answered).as_secs_f64());
        }
        self.arrivals += 1;
        if self.arrivals == ROUND {
            self.judge(at);
        }
    }

    /// Requests were answered, or `lost`: that is an answer, too.
    pub fn answered(&mut self, at: Time, requests: u32, lost: bool) {
        self.lost |= lost;
        for _ in 0..requests.min(self.under_way) {
            self.answered.push_back(at);
        }
        self.under_way = self.under_way.saturating_sub(requests);
        while self.answered.len() > MOST as usize {
            self.answered.pop_front();
        }
    }

    /// How many clients there are, if they wait for answers.
    pub fn clients(&self) -> Option<u32> {
        self.clients
    }

    /// What another client takes before it asks again. `hopeful`: as where it has the machine to itself, which clients have beside whom the device waits.
    pub fn pause(&self, random: &mut Random, hopeful: bool) -> Duration {
        let draws = if hopeful { 4 } else { 1 };
        let drawn = (0..draws).filter_map(|_| self.pauses.draw(random)).min_by(f64::total_cmp);
        Duration::from_secs_f64(drawn.unwrap_or(0.0))
    }

    fn judge(&mut self, now: Time) {
        let circle = now.since(self.began).as_secs_f64() * f64::from(self.most) / f64::from(ROUND);
        let at_ceiling = self.hits >= ROUND / (2 * self.most.max(1)) && self.most <= MOST;
        let waits = self.pauses.mean() * 2.0 < circle;
        self.clients = (at_ceiling && waits && !self.lost).then_some(self.most);
        (self.most, self.hits, self.arrivals, self.lost, self.began) = (0, 0, 0, false, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a device of batches of half of what is under way makes of `clients`, and of requests that come by chance.
    fn judged(clients: Option<u32>) -> Option<u32> {
        let (mut judged, mut random) = (ClosedLoop::default(), Random(7));
        let (mut now, mut arrivals, mut waiting) = (0, 0, 0);
        while arrivals < 4 * ROUND {
            now += 1_000_000;
            judged.answered(Time::from_nanos(now), waiting, false);
            let coming = match clients {
                Some(clients) if arrivals == 0 => clients,
                Some(_) => waiting,
                // As many in the mean, but more or fewer of them.
                None => (0..64).filter(|_| random.even() < 0.25).count() as u32,
            };
            (0..coming).for_each(|i| judged.arrived(Time::from_nanos(now + 1_000 * u64::from(i))));
            arrivals += coming;
            waiting = judged.under_way.div_ceil(2);
        }
        judged.clients()
    }

    #[test]
    fn clients_that_wait_for_answers_are_told_from_requests_that_come_by_chance() {
        assert_eq!([1, 2, 7, 32, 200].map(|clients| judged(Some(clients))), [1, 2, 7, 32, 200].map(Some));
        assert_eq!(judged(None), None);
    }

    #[test]
    fn who_thinks_for_longer_than_waits_is_no_closed_loop() {
        let mut judged = ClosedLoop::default();
        for round in 0..u64::from(2 * ROUND) {
            judged.arrived(Time::from_nanos(round * 1_000_000));
            judged.answered(Time::from_nanos(round * 1_000_000 + 400_000), 1, false);
        }
        assert_eq!(judged.clients(), None);
    }

    #[test]
    fn where_requests_are_lost_the_load_is_taken_for_one_that_goes_on() {
        let mut judged = ClosedLoop::default();
        for round in 0..u64::from(4 * ROUND) {
            judged.arrived(Time::from_nanos(round * 1_000_000));
            judged.answered(Time::from_nanos(round * 1_000_000 + 990_000), 1, round % 1_000 == 0);
        }
        assert_eq!(judged.clients(), None);
    }
}
