//! One scene, played in every way that an accident could make it.

use std::fmt::Write;

use anyhow::{Context, Result, bail, ensure};
use towpath_chassis::{Error, kill};

use crate::{Life, Process, World};

/// Who brings the scene about again after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// Nobody: it was a message or a timer, and the sweeps alone must make it good (SWEPT).
    Nobody,
    /// The client or the supervisor that had no answer asks again.
    Asker,
    /// The same, and it may be asked for at any time: there is no too late.
    Owner,
}

/// A handler, timer, sweep or function, in a world that calls for it.
pub struct Scene<S, A> {
    /// Brings a world into the state before it.
    pub set: S,
    pub act: A,
    pub who: Who,
    /// Whether it belongs to one epoch, so that a newer one must fence it.
    pub fenced: bool,
}

/// Kill points after which a scene is taken for one that never ends.
const POINTS: usize = 64;

/// Plays it once for reference, then twice, twice at once, in two processes at once, among messages that nobody called for, late, after a newer epoch, and
/// killed at every point.
pub async fn play<S, A>(scene: Scene<S, A>) -> Result<()>
where
    S: AsyncFn(&World) -> Result<Life>,
    A: AsyncFn(&Process, &World, &Life) -> Result<()>,
{
    let mut stage = Stage { world: World::start().await?, scene, reference: String::new(), posts: 0 };
    let points = stage.once().await.context("once")?;
    stage.twice().await.context("twice, one after the other")?;
    stage.at_once().await?;
    stage.out_of_order().await.context("out of order: every message before and after it")?;
    if stage.scene.who != Who::Owner {
        stage.late().await.context("late, for the first time: the run had ended")?;
        stage.late_again().await.context("late, again: the run had ended")?;
    }
    if stage.scene.fenced {
        stage.overtaken().await.context("late: a newer epoch was at work")?;
    }
    ensure!(points.len() < POINTS, "{} kill points", points.len());
    for (at, point) in points.iter().enumerate() {
        stage.killed(at).await.with_context(|| format!("killed at point {at}, `{point}`, of {points:?}"))?;
    }
    Ok(())
}

struct Stage<S, A> {
    world: World,
    scene: Scene<S, A>,
    reference: String,
    posts: usize,
}

impl<S, A> Stage<S, A>
where
    S: AsyncFn(&World) -> Result<Life>,
    A: AsyncFn(&Process, &World, &Life) -> Result<()>,
{
    async fn set(&mut self) -> Result<Life> {
        self.world.anew().await.context("a world anew")?;
        let life = (self.scene.set)(&self.world).await.context("the state before")?;
        // Whatever was published on the way there is lost.
        self.world.lose_messages().await?;
        Ok(life)
    }

    async fn act(&self, process: &Process, life: &Life) -> Result<()> {
        (self.scene.act)(process, &self.world, life).await
    }

    /// The reference; the points that it passes.
    async fn once(&mut self) -> Result<Vec<&'static str>> {
        let life = self.set().await?;
        let kill::Fate::Ended { value, points } = kill::run(usize::MAX, self.act(&self.world.first, &life)).await else {
            bail!("killed by nobody")
        };
        value?;
        self.world.recover().await?;
        self.reference = self.world.digest().await?;
        self.posts = self.world.posts().len();
        Ok(points)
    }

    async fn twice(&mut self) -> Result<()> {
        let life = self.set().await?;
        self.act(&self.world.first, &life).await?;
        self.act(&self.world.second, &life).await.context("the second time")?;
        self.same(true).await
    }

    async fn at_once(&mut self) -> Result<()> {
        let life = self.set().await?;
        let (one, other) = tokio::join!(self.act(&self.world.first, &life), self.act(&self.world.first, &life));
        one.and(other).context("twice at once in one process")?;
        self.same(true).await.context("twice at once in one process")?;
        let life = self.set().await?;
        let (one, other) = tokio::join!(self.act(&self.world.first, &life), self.act(&self.world.second, &life));
        one.and(other).context("in two processes at once")?;
        self.same(true).await.context("in two processes at once")
    }

    /// Every message that there could be of this run comes before it, and again after it.
    async fn out_of_order(&mut self) -> Result<()> {
        let life = self.set().await?;
        self.world.every_message(&life).await.context("before")?;
        self.act(&self.world.first, &life).await?;
        self.world.every_message(&life).await.context("after")?;
        self.same(true).await
    }

    async fn late(&mut self) -> Result<()> {
        let life = self.set().await?;
        if !self.world.has_runs().await? {
            return Ok(());
        }
        self.world.finish().await?;
        self.changes_nothing(&life).await
    }

    async fn late_again(&mut self) -> Result<()> {
        let life = self.set().await?;
        self.act(&self.world.first, &life).await?;
        self.world.finish().await?;
        self.changes_nothing(&life).await
    }

    async fn overtaken(&mut self) -> Result<()> {
        let life = self.set().await?;
        self.world.raise(&life).await?;
        self.changes_nothing(&life).await
    }

    async fn killed(&mut self, at: usize) -> Result<()> {
        let life = self.set().await?;
        match kill::run(at, self.act(&self.world.first, &life)).await {
            kill::Fate::Killed(_) => {}
            kill::Fate::Ended { value, points } => {
                value?;
                bail!("it ended before the point came: {points:?}");
            }
        }
        self.world.reborn();
        if self.scene.who != Who::Nobody {
            self.act(&self.world.second, &life).await.context("asked again")?;
        }
        self.same(false).await
    }

    /// The world comes to rest as in the reference. Only a crash may make a result be sent twice, and only under the same id.
    async fn same(&mut self, posts_too: bool) -> Result<()> {
        self.world.recover().await?;
        compare(&self.reference, &self.world.digest().await?)?;
        let posts = self.world.posts().len();
        ensure!(!posts_too || posts == self.posts, "{posts} posts, not {}", self.posts);
        Ok(())
    }

    async fn changes_nothing(&mut self, life: &Life) -> Result<()> {
        let (before, posts) = (self.world.digest().await?, self.world.posts().len());
        match self.act(&self.world.first, life).await {
            Ok(()) => {}
            Err(error) if error.downcast_ref::<Error>().is_some_and(|error| matches!(error, Error::Refused(_))) => {}
            Err(error) => return Err(error),
        }
        self.world.recover().await?;
        compare(&before, &self.world.digest().await?)?;
        ensure!(self.world.posts().len() == posts, "{} posts, not {posts}", self.world.posts().len());
        Ok(())
    }
}

/// Says which lines differ.
fn compare(expected: &str, found: &str) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    let mut text = String::new();
    let count = |all: &str, line: &str| all.lines().filter(|other| *other == line).count();
    for line in expected.lines().filter(|line| count(found, line) < count(expected, line)) {
        writeln!(text, "- {line}")?;
    }
    for line in found.lines().filter(|line| count(expected, line) < count(found, line)) {
        writeln!(text, "+ {line}")?;
    }
    if text.is_empty() {
        text = format!("the order differs:\n{expected}\n---\n{found}");
    }
    bail!("the world differs:\n{text}\nall of it:\n{found}")
}
