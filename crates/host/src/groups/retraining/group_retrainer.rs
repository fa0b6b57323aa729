//! Trains the predictor of operator groups with served groups. The rehearsal's thread does this
//! work when it has time.

use std::sync::Arc;

use downbeat_core::device::overlap::Mlp;
use downbeat_training::{GroupSample, MlpTraining, error_below, mean_error, random_group, relative_error, says};
use rand::RngExt;
use rand_pcg::Pcg64;
use rand_pcg::rand_core::SeedableRng;

use super::learning::{Judged, Learning};
use super::served_groups::ServedGroups;
use crate::groups::group_predictor::GroupPredictor;
use crate::groups::stored_predictor::StoredPredictor;

/// A training is due after this many served groups, with at least `HELD_OUT` groups held out.
const SERVED: u64 = 256;
const HELD_OUT: usize = 48;
/// The passes over the samples.
const EPOCHS: u32 = 30;
/// The fewest imagined groups of a training: they keep the knowledge of groups that are not served.
const IMAGINED: usize = 400;
/// An error counts as better if it is less by this many standard errors of the difference, and by
/// `SHARE` of itself.
const ERRORS: f64 = 3.0;
const SHARE: f64 = 0.1;
/// Seeds the choice of imagined groups, and the order of samples.
const SEED: u64 = 23;

/// Trains the predictor of operator groups with served groups (Abacus trains its predictor once).
/// Training goes on from the present weights, with the served groups and as many imagined ones,
/// drawn as for the first training. The time of an imagined group is the present prediction, times
/// the ratio of actual to predicted time of served groups of the same models. The result is adopted
/// if it is better on served groups that were held out, by more than their noise.
pub struct GroupRetrainer {
    predictor: Arc<GroupPredictor>,
    served: ServedGroups,
    /// The number of served groups at the last training.
    trained_at: u64,
    training: Option<MlpTraining<Pcg64>>,
    rng: Pcg64,
}

impl GroupRetrainer {
    /// Makes a retrainer of a predictor.
    pub fn new(predictor: Arc<GroupPredictor>) -> Self {
        let (served, rng) = (ServedGroups::default(), Pcg64::seed_from_u64(SEED));
        GroupRetrainer { predictor, served, trained_at: 0, training: None, rng }
    }

    /// Takes the served groups, and trains for a fraction of a millisecond. Returns false if there
    /// is nothing to do. `ended` hears of a training that ended, and whether its predictor is
    /// adopted.
    pub fn step(&mut self, ended: impl FnOnce(bool)) -> bool {
        match self.train() {
            Some(Some(judged)) => ended(judged.adopted),
            Some(None) => {}
            None => return false,
        }
        true
    }

    /// Trains for a fraction of a millisecond. `None`: there is nothing to do. `Some(Some(_))`: a
    /// training has ended.
    fn train(&mut self) -> Option<Option<Judged>> {
        let predictor = self.predictor.clone();
        let (learning, stored) = (predictor.learning()?, predictor.in_use()?);
        while let Some((group, took)) = learning.served.pop() {
            let models: Vec<usize> = group.iter().map(|part| part.model.0 as usize).collect();
            if let Some(features) = stored.features(&group) {
                self.served.add(&models, GroupSample { features, takes_ms: took.as_millis_f64(), set: 0 });
            }
        }
        if let Some(training) = &mut self.training {
            if training.step() {
                return Some(None);
            }
            let mlp = self.training.take()?.finish();
            // A result with a NaN is not better.
            return Some(mlp.ok().map(|mlp| self.judge(learning, &stored, mlp)));
        }
        let is_due = self.served.served() - self.trained_at >= SERVED && self.served.held_out().count() >= HELD_OUT;
        is_due.then(|| {
            self.begin(&stored);
            None
        })
    }

    fn begin(&mut self, stored: &StoredPredictor) {
        self.trained_at = self.served.served();
        let count = self.served.training().count().max(IMAGINED);
        let imagined = self.imagine(stored, count);
        let samples: Vec<&GroupSample> = self.served.training().chain(&imagined).collect();
        let rng = Pcg64::seed_from_u64(SEED.wrapping_add(self.trained_at));
        self.training = Some(MlpTraining::resume(stored.mlp(), &samples, EPOCHS, rng));
    }

    /// Groups of any models that it knows, as often as each other by their number.
    fn imagine(&mut self, stored: &StoredPredictor, count: usize) -> Vec<GroupSample> {
        let ratios = self.served.ratios(|features| says(stored.mlp(), features));
        let (rng, models) = (&mut self.rng, &stored.models);
        let mut one = || {
            let mut set: Vec<usize> = (0..models.len()).collect();
            (1..set.len()).rev().for_each(|index| set.swap(index, rng.random_range(0..=index)));
            set.truncate(rng.random_range(1..=stored.at_once().clamp(1, models.len().max(1))));
            set.sort_unstable();
            let inputs = |model: usize, rng: &mut Pcg64| {
                let (rows, longest) = (models[model].most_rows.max(1), models[model].longest);
                (rng.random_range(1..=rows), if longest > 0 { rng.random_range(1..=longest) } else { 0 })
            };
            let group = random_group(&set, rng, |model| models[model].segments.max(1), inputs);
            let features = stored.features(&group)?;
            let takes_ms = says(stored.mlp(), &features) * ratios.get(&set).copied().unwrap_or(1.0);
            (takes_ms.is_finite() && takes_ms > 0.0).then_some(GroupSample { features, takes_ms, set: 0 })
        };
        (0..count).filter_map(|_| one()).collect()
    }

    /// Adopts it if it is better.
    fn judge(&self, learning: &Learning, stored: &StoredPredictor, mlp: Mlp) -> Judged {
        let held_out: Vec<&GroupSample> = self.served.held_out().collect();
        let error = |mlp: &Mlp| mean_error(held_out.iter().copied(), |features| says(mlp, features));
        let (before, after) = (error(stored.mlp()), error(&mlp));
        let better_by = held_out.iter().map(|sample| {
            let off = |mlp: &Mlp| relative_error(sample, says(mlp, &sample.features));
            off(stored.mlp()) - off(&mlp)
        });
        let is_better = is_above_noise(better_by, SHARE * before);
        let adopted = is_better
            .then(|| stored.retrained(mlp.clone(), (error_below(&mlp, &held_out), after)))
            .and_then(|retrained| retrained.inspect_err(|reason| tracing::warn!(%reason, "a training failed")).ok());
        let judged = Judged {
            served: self.served.served(),
            held_out: held_out.len(),
            before,
            after,
            adopted: adopted.is_some(),
        };
        let Judged { served, held_out, adopted: is_adopted, .. } = judged;
        tracing::info!(
            served,
            held_out,
            before,
            after,
            adopted = is_adopted,
            "the predictor of groups was trained with the requests served"
        );
        learning.judged(judged, adopted);
        judged
    }
}

/// Whether the mean of these values is above `least`, and above zero by more than their scatter.
fn is_above_noise(values: impl Iterator<Item = f64>, least: f64) -> bool {
    let values: Vec<f64> = values.collect();
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let scatter = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0)).sqrt();
    mean > least && mean > ERRORS * scatter / count.sqrt()
}

#[cfg(test)]
mod tests {
    use downbeat_core::device::overlap::{GroupPart, Layer, LearnedPredictor};
    use downbeat_core::{Duration, ModelId};
    use downbeat_service::options::DeviceOptions;

    use super::*;
    use crate::groups::stored_predictor::{PredictedModel, Training};

    /// A perceptron of one layer: 2 ms, more for each item of either model, and twice as long side
    /// by side.
    fn stored() -> StoredPredictor {
        let model = |name: &str| PredictedModel {
            name: name.to_owned(),
            version: 1,
            file: "f".to_owned(),
            segments: 4,
            cuts: Vec::new(),
            most_rows: 8,
            longest: 0,
        };
        let models = vec![model("a"), model("b")];
        let layout = StoredPredictor::layout(&models, 2);
        let mut weights = vec![0.0; layout.len()];
        (weights[0], weights[1], weights[4], weights[8]) = (2_f32.ln(), 2_f32.ln(), 0.1, 0.1);
        let layer = Layer { weights, biases: vec![0.0] };
        let mlp = Mlp::new(vec![0.0; layout.len()], vec![1.0; layout.len()], vec![layer]).unwrap();
        let (device, threads, samples, tested) = ("here".to_owned(), 1, 80, 20);
        let training = Training { device, threads, models, error: 0.1, mean_error: 0.05, samples, tested };
        StoredPredictor::new(training, LearnedPredictor::new(layout, mlp).unwrap()).unwrap()
    }

    fn draw(set: &[usize], rng: &mut Pcg64) -> Vec<GroupPart> {
        random_group(set, rng, |_| 4, |_, rng| (rng.random_range(1..=8), 0))
    }

    /// Serves `groups` groups of both models that take `times` the prediction, give or take 10%.
    /// Returns the outcome of each training.
    fn serve(predictor: &Arc<GroupPredictor>, groups: u64, times: f64) -> Vec<Judged> {
        let (mut retrainer, mut rng) = (GroupRetrainer::new(predictor.clone()), Pcg64::seed_from_u64(1));
        let (stored, mut judged) = (stored(), Vec::new());
        for _ in 0..groups {
            let group = draw(&[0, 1], &mut rng);
            let predicted = says(stored.mlp(), &stored.features(&group).unwrap());
            let took = Duration::from_millis_f64(predicted * times * rng.random_range(0.9..1.1));
            predictor.serves(&group, took, |model| Some(if model == ModelId(0) { "a" } else { "b" }));
            while let Some(came) = retrainer.train() {
                judged.extend(came);
            }
        }
        judged
    }

    fn predictor(is_heard: bool) -> (tempfile::TempDir, Arc<GroupPredictor>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("predictor.json");
        stored().save(&path).unwrap();
        let options = DeviceOptions { predictor: Some(path), ..DeviceOptions::default() };
        (folder, Arc::new(GroupPredictor::open(&options, is_heard)))
    }

    #[test]
    fn a_predictor_that_is_right_stays_as_it_is() {
        let (_folder, predictor) = predictor(true);
        let judged = serve(&predictor, 1_024, 1.0);
        assert_eq!(judged.len(), 4);
        assert!(judged.iter().all(|judged| !judged.adopted && judged.before < 0.06), "{judged:?}");
        assert_eq!(*predictor.in_use().unwrap(), stored());
        let report = predictor.learning().unwrap().report();
        assert_eq!((report.trainings, report.adopted, predictor.mean_error()), (4, 0, Some(0.05)));
    }

    #[test]
    fn new_slowness_is_learned_and_unserved_sets_are_remembered() {
        let (folder, predictor) = predictor(true);
        let judged = serve(&predictor, 1_024, 1.6);
        assert!(judged[0].adopted && judged[0].before > 0.35 && judged[0].after < 0.15, "{judged:?}");
        let (before, now) = (stored(), predictor.in_use().unwrap());
        assert_eq!(predictor.mean_error(), Some(now.mean_error));
        let mut rng = Pcg64::seed_from_u64(2);
        for (set, times) in [(&[0, 1][..], 1.6), (&[0], 1.0), (&[1], 1.0)] {
            let ratio = |_| {
                let features = before.features(&draw(set, &mut rng)).unwrap();
                says(now.mlp(), &features) / says(before.mlp(), &features)
            };
            let mean = (0..100).map(ratio).sum::<f64>() / 100.0;
            assert!((mean / times - 1.0).abs() < 0.1, "{set:?}: {mean} in place of {times}");
        }
        assert_eq!(StoredPredictor::load(&folder.path().join("predictor.json")).unwrap(), before, "the file stays");
    }

    #[test]
    fn where_there_is_no_time_for_it_nothing_is_heard() {
        let (_folder, predictor) = predictor(false);
        assert!(serve(&predictor, 512, 1.6).is_empty());
        assert!(predictor.learning().is_none());
    }

    #[test]
    fn noise_is_not_better() {
        let noise = |mean: f64| (0..64).map(move |index| mean + if index % 2 == 0 { 0.2 } else { -0.2 });
        assert!(!is_above_noise(noise(0.05), 0.0), "three standard errors are 0.075");
        assert!(is_above_noise(noise(0.1), 0.0) && !is_above_noise(noise(0.1), 0.15));
        assert!(!is_above_noise([f64::NAN; 9].into_iter(), 0.0) && !is_above_noise(std::iter::empty(), 0.0));
    }
}
